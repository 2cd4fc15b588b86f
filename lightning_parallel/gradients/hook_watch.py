"""Refuses hooks that change gradients, or branch, by a number computed from this rank's part of them.

Elementwise changes give what they give in one process: scaling, masks, clipping by value. A norm, or any other number
that is computed from gradients, is of this rank's part only. It may be logged, but nothing may be decided by it::

    for p in self.parameters():
        p.grad.clamp_(-1, 1)                                  the same as in one process
    self.log_dict(grad_norm(self, 2))                         warned of: of this rank's part
    torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)    refused: each rank would scale by another norm
    self.clip_gradients(optimizer, 1.0, "norm")               by the norm of the whole model

It also refuses writes to a copy of a fully sharded parameter or gradient: they would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.gradients.overridden import overridden
from lightning_parallel.private.lightning.batches import around_step_hooks
from lightning_parallel.private.torch.modules import has_gradient_hooks
from lightning_parallel.private.torch.tensors import base_of, tensors_in
from lightning_parallel.ranks.local_model import local_part, memory_of
from lightning_parallel.ranks.run import Run
from lightning_parallel.values import line_outside

# Names of what writes to its first argument. `__int__`, `__index__` and `__invert__` read; `_amp_` is a loss scaler's.
_IN_PLACE = re.compile("__setitem__|__i(?!n).*__|(?!_amp_).*[^_]_")
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]
_ASKS = ("__bool__", "equal", "allclose")  # what branches are decided by
_LIBRARIES = ("torch", "lightning", "lightning_parallel", "contextlib")
_NUMBERS = ("item", "tolist", "numpy", "__float__", "__array__")


class GradientWatch(TorchFunctionMode):
    """Watches hooks between the end of a backward and the optimizer's work (:meth:`begin`, :meth:`end`). Where
    parameters are only fully sharded (not ``in_parts``), it refuses only changes that would be lost. As a context it
    does so in a step, too.
    """

    def __init__(self, run: Run, parameters: Iterable[nn.Parameter], *, in_parts: bool) -> None:
        super().__init__()
        self._module, self._precision, self._parameters = run.module, run.precision, list(parameters)
        self._in_parts = in_parts
        self._is_needed = False  # has `ask` found hooks that may see gradients?
        self._put_back = ExitStack()
        self._is_open = self._is_paused = self._has_warned = False
        self._memories: set[int] = set()  # of the gradients
        self._made = WeakIdKeyDictionary()  # tensors made from gradients; is one a number of several?
        self._number = ""  # the call that has made the last such number

    def ask(self) -> None:
        """Find out whether code of the user's can see gradients in its hooks. If so, these are watched from now on."""
        module = self._module
        hooks = ("on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping")
        sees = not module.automatic_optimization or bool(overridden(module.trainer, module, *hooks))
        if sees and not self._is_needed:
            self._is_needed = True
            self._put_back.callback(around_step_hooks(self._precision, self.begin, self.end))

    def begin(self) -> None:
        """Begin to watch: gradients are complete, and hooks may follow."""
        if self._is_open or not self._is_needed:
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._memories = {memory_of(gradient) for gradient in gradients} - {0}
        self._is_open = True
        self.__enter__()

    def end(self) -> None:
        """Stop watching: no hook follows that sees gradients."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)
            self._made, self._number = WeakIdKeyDictionary(), ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is watched: the library itself clips."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """End the watch with the run."""
        self.end()
        self._put_back.close()

    # -- calls ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        _refuse_lost_changes(self._module, function, args)
        if self._is_paused or not self._in_parts:
            return function(*args, **(kwargs or {}))
        given = [x for x in tensors_in((args, kwargs)) if x in self._made or memory_of(x) in self._memories]
        name = getattr(function, "__name__", "")
        if self._number and self._changes(function, name, args):
            raise RuntimeError(
                f"{line_outside(_LIBRARIES)} changes gradients, after {self._number} has computed a number from "
                f"gradients. Each rank has those of its own part of the model, so each would change them otherwise. To "
                f"clip by the norm of the whole model set gradient_clip_val, or call self.clip_gradients in "
                f"configure_gradient_clipping."
            )
        if given and name in _ASKS:
            raise RuntimeError(
                f"{line_outside(_LIBRARIES)} decides by the gradients of this rank, which has a part of the model, so "
                f"ranks may decide differently. Leave it out. The callback FiniteLoss ends a run whose loss is NaN."
            )
        output = function(*args, **(kwargs or {}))
        if given:
            self._note(given, tensors_in(output), name)
        return output

    def _changes(self, function: Any, name: str, args: tuple[Any, ...]) -> bool:
        if not _IN_PLACE.fullmatch(name):
            return bool(function == _SET_GRADIENT)
        return any(memory_of(tensor) in self._memories for tensor in tensors_in(args[:1]))

    def _note(self, given: list[Tensor], made: Iterable[Tensor], name: str) -> None:
        size = max(tensor.numel() for tensor in given)
        from_numbers = any(self._made.get(tensor) for tensor in given)
        if name in _NUMBERS and size > 1:
            self._found_number(name)
        for tensor in made:
            if memory_of(tensor) in self._memories:
                continue
            self._made[tensor] = is_number = from_numbers or tensor.numel() < size
            if is_number:
                self._found_number(name)

    def _found_number(self, name: str) -> None:
        self._number = self._number or f"{name}() in {line_outside(_LIBRARIES)}"
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{self._number} computes a number from gradients. Each rank has those of its own part of the model: a "
                f"norm of one parameter may be right, one of all of them isn't."
            )


def refuse_hooks_of_parameters(module: pl.LightningModule) -> None:
    """Refuse hooks of the user's on parameters. A part of a parameter has none of them, and those on a whole one would
    see the gradients of microbatches or replicas, before they are summed."""
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise ValueError(
                f"'{name}' has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), which "
                f"would see the gradient of a part of the batch or of the model. Change gradients in "
                f"on_before_optimizer_step, which sees them complete."
            )


def _refuse_lost_changes(module: nn.Module, function: Any, args: tuple[Any, ...]) -> None:
    """Refuse a call of a torch function that would change a copy of a fully sharded parameter or gradient of
    ``module``."""
    copied = _changed_by_copy(function, args)
    if copied is None:
        return
    named = module.named_parameters()
    names = {local_part(t).data_ptr(): n for n, p in named for t in (p, p.grad) if isinstance(t, DTensor)}
    does = "assigns to .data" if function == _SET_DATA else "writes to some rows"
    raise ValueError(
        f"{line_outside(_LIBRARIES)} {does} of '{names.get(local_part(copied).data_ptr())}', which is fully sharded: "
        f"the change would be lost. Change all of it in place, as by `.data.copy_(...)`, or `.mul_(mask)` with a mask "
        f"that is made by torch.distributed.tensor.distribute_tensor(mask, p.device_mesh, p.placements). Or use "
        f"strategy='ddp'."
    )


def _changed_by_copy(function: Any, args: tuple[Any, ...]) -> DTensor | None:
    """The fully sharded tensor of which a call would change a copy; None if there is none."""
    if function == _SET_DATA:  # a DTensor computes with a tensor of its own, whatever its `.data` is set to
        return args[0] if isinstance(args[0], DTensor) else None
    name = getattr(function, "__name__", "")
    for tensor in tensors_in(args[:1]) if _IN_PLACE.fullmatch(name) else ():
        # An assignment by index writes to the view that the index gives. Torch's view of some rows is a copy here.
        written = tensor[args[1]] if name == "__setitem__" and isinstance(tensor, DTensor) else tensor
        base = base_of(written)
        if isinstance(base, DTensor) and memory_of(base) != memory_of(written):
            return base
    return None
