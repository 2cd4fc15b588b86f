"""Makes the changes of a hook that runs on one stage on the other stages too.

``on_train_epoch_end`` and ``on_validation_epoch_end`` run on the last stage, which has what the steps gathered. A user
may also set something there that other stages read later::

    def on_train_epoch_end(self):
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5     an option of an optimizer
        self.best = min(self.best, self.trainer.callback_metrics["loss"].item())     a number on a module
        self.hparams.noise *= 0.5                                    one in a dictionary, a list or an object
        self.offset = self.offset * 0.5                              a tensor
        self.layers[0].eval()                                        a mode
        self.layers[0].requires_grad_(True)                          which parameters are trained
        self.temperature.mul_(0.9)                                   a buffer outside the layers

Metrics, and lists of other things, stay as they are: they hold what was gathered on the last stage. Parameters aren't
sent either: the hook may change those that only this stage has, and a change of another one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.ranks.writes import digest
from lightning_parallel.values import PLAIN, same_value

_LARGE = 2**20  # elements; a larger buffer is somebody's data
_LONG = 1000  # items; a longer dictionary holds what was gathered
_OF_MODULES = frozenset(vars(LightningModule())) - {"training"}  # attributes that torch and Lightning keep

Settings = Mapping[tuple[Any, ...], Any]


def settings_of(module: nn.Module, optimizers: Sequence[Optimizer]) -> Settings:
    """What a hook may set, by where it lies: numbers on modules and in their dictionaries, lists and objects, tensors,
    modes, flags of parameters, and options."""
    found: dict[tuple[Any, ...], Any] = {}
    for path, part in module.named_modules():
        if not isinstance(part, Metric):
            own = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            found |= {("attribute", path, name): _copy(value) for name, value in own.items() if _is_plain(value)}
            for name, value in own.items():
                is_dict, items = isinstance(value, dict), _items(value)
                plain = ((key, item) for key, item in items.items() if type(key) in PLAIN and _is_plain(item))
                for key, item in plain if len(items) <= _LONG else ():
                    place = ("item", path, name, key) if is_dict else ("field", path, name, key, id(value))
                    found[place] = _copy(item)
    found |= {("trains", name): parameter.requires_grad for name, parameter in module.named_parameters()}
    found |= {("buffer", name): _copy(buffer) for name, buffer in module.named_buffers() if _is_plain(buffer)}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and _is_plain(value):
                    found["option", index, number, name] = _copy(value)
    return found


def _is_plain(value: Any) -> bool:
    """Is it a number, a text or None, a tuple or a list of these, as Adam's betas are, or a small tensor?"""
    if type(value) is Tensor:
        has_values = value.layout is torch.strided and not (value.is_meta or value.is_nested)
        return has_values and value.numel() <= _LARGE
    items = value if type(value) in (tuple, list) else (value,)
    return len(items) <= _LONG and all(type(item) in PLAIN or isinstance(item, np.generic) for item in items)


def _copy(value: Any) -> Any:
    if type(value) is Tensor:
        return value.detach().cpu().clone()
    return [*value] if type(value) is list else value


def _items(value: Any) -> dict[Any, Any]:
    """What lies in a dictionary, or in an object that is no module."""
    if isinstance(value, dict):
        return value
    return {} if isinstance(value, Tensor | nn.Module | type) else getattr(value, "__dict__", {})


def changed(before: Settings, after: Settings) -> Settings:
    """The settings that are new or have another value. Of another object there are no fields, which this one had."""
    return {
        place: value
        for place, value in after.items()
        if (not same_value(before[place], value) if place in before else place[0] != "field")
    }


def make(changes: Settings, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Make changes of another stage here, as far as what they change is here."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    for (kind, *where), value in changes.items():
        if kind == "attribute":
            setattr(module.get_submodule(where[0]), where[1], _placed(value, module))
        elif kind in ("item", "field"):
            _items(vars(module.get_submodule(where[0])).get(where[1]))[where[2]] = _placed(value, module)
        elif kind == "trains":
            parameters[where[0]].requires_grad_(value)
        elif kind == "buffer":
            if not isinstance(buffers[where[0]], AbsentTensor):
                buffers[where[0]].copy_(value)
        else:
            optimizers[where[0]].param_groups[where[1]][where[2]] = _placed(value, module)


def _placed(value: Any, module: LightningModule) -> Any:
    return value.to(module.device) if isinstance(value, Tensor) else value


@contextmanager
def only_own_changed(hook: str, module: nn.Module, shared: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, the module's own ``hook`` runs on this stage alone. A change of a parameter or buffer that another stage
    has raises a RuntimeError, at that line if it is seen there: it would be made here only.

    Args:
        shared: the parameters that this stage and others have, by name.
    """

    def refuse(name: str, settles: bool = False) -> NoReturn:
        raise RuntimeError(
            f"{hook} changes '{name}', which is on another pipeline stage, but this hook of the module runs on the "
            f"last stage only: the change would be lost there. Make it in on_train_batch_end, or in a callback's "
            f"{hook}, which run on all stages."
        )

    def absent_ones() -> dict[str, AbsentTensor]:
        named = chain(module.named_parameters(), module.named_buffers())
        return {name: tensor for name, tensor in named if isinstance(tensor, AbsentTensor)}

    before = absent_ones()
    digests = {name: digest(parameter) for name, parameter in shared.items()}
    with ExitStack() as put_back:
        for name, tensor in before.items():
            put_back.callback(setattr, tensor.memory, "listeners", tensor.memory.listeners)
            tensor.memory.listeners += (partial(refuse, name),)
        yield
    after = absent_ones()
    for name, tensor in before.items():
        if after.get(name) is not tensor:  # another one was put in its place
            refuse(name)
    for name, parameter in shared.items():
        if not torch.equal(digest(parameter), digests[name]):
            refuse(name)
