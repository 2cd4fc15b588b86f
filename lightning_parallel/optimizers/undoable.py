"""A step of an optimizer that can be undone, and made again with other gradients.

What the step will write to is copied before it: about as much memory as the parameters, their gradients and the
optimizer's state take.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.optimizers.options import Options, options_of, restored
from lightning_parallel.values import PLAIN, same_value

# What torch keeps on an optimizer, beside its groups and its state. Schedulers put their marks there, too.
_OF_TORCH = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))) | {"step", "_opt_called"}


class UndoableStep:
    """The step that ``optimizer`` is about to make with the gradients on its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]
        # One without a gradient may move, too: by its momentum.
        moving = [p for p in self._parameters if p.requires_grad or p.grad is not None or p in optimizer.state]
        self._values = {p: p.detach().clone() for p in moving}
        self._state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
        self._options = options_of(optimizer)
        self._written: Options = [{} for _ in self._options]
        self._own = _own_of(optimizer)

    def made(self) -> None:
        """Note which options the step has written (a count), right after it was made or skipped. Only an :meth:`undo`
        without :meth:`make_again` needs it, to put these back."""
        for written, before, group in zip(self._written, self._options, self.optimizer.param_groups, strict=True):
            written.update({k: v for k, v in before.items() if not same_value(group[k], v)})

    def undo(self) -> None:
        """Undo the step, and put its gradients back. Options that a scheduler has set since then stay."""
        with torch.no_grad():
            for parameter, value in self._values.items():
                parameter.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(self._state)
        for name in _own_of(self.optimizer).keys() - self._own.keys():  # which the step has made, as a count
            delattr(self.optimizer, name)
        vars(self.optimizer).update(self._own)
        for group, options, written in zip(self.optimizer.param_groups, self._options, self._written, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(written)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def make_again(self) -> None:
        """After :meth:`undo`, make the step with the gradients that are on the parameters now, and its old options."""
        with restored(self.optimizer, self._options, set()):
            self.optimizer.step()


def refuse_undoing(optimizer: Optimizer, setting: str) -> None:
    """Refuse an optimizer whose steps can't be undone. ``setting`` asks for it, for messages."""
    for name, value in _own_of(optimizer).items():
        if not (isinstance(value, PLAIN) or callable(value)):
            raise ValueError(
                f"{setting}: {type(optimizer).__name__} keeps {name!r} ({type(value).__name__}) beside its state, so "
                f"its steps can't be undone. Take an optimizer that keeps all in optimizer.state, such as AdamW, or "
                f"leave {setting} out."
            )


def _own_of(optimizer: Optimizer) -> dict[str, Any]:
    """What the class of an optimizer keeps on it, beside torch's own."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
