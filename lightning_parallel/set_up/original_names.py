"""Finds what still refers to the parameters of a whole module after it has been divided.

Some modules take an optimizer as an argument, and return it from ``configure_optimizers``. It has the parameters of the
whole module, and is pointed at those that now have their names. A module that keeps old ones in an attribute is
refused, and so is an optimizer that keeps any, or has something else that no checkpoint would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class OriginalNames:
    """The names of a whole module's parameters, also after they have been replaced. ``strategy`` is the name of its
    class, for messages."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], strategy: str) -> None:
        # Others are of a module that has been divided. torch can't move a DTensor that has a weak reference.
        plain = {parameter: name for name, parameter in named if type(parameter) is nn.Parameter}
        self._names = WeakIdKeyDictionary(plain)
        self._names_by_id = {id(parameter): name for parameter, name in plain.items()}
        self._strategy = strategy

    def rebind(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Replace each parameter of the whole module by the one that now has its name.

        Raises:
            ValueError: an optimizer has a parameter that isn't the module's, which no rank would train, or each another
                copy. Or it has stepped one that has been replaced, or has a state of none.
        """
        now = dict(module.named_parameters(remove_duplicate=False))
        own = set(map(id, now.values()))
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                group["params"] = [now.get(self._names.get(each, ""), each) for each in group["params"]]
                for parameter in (each for each in group["params"] if id(each) not in own):
                    raise ValueError(
                        f"{kind} has a parameter of shape {tuple(parameter.shape)} that isn't one of the module's. "
                        f"Register what holds it on the LightningModule, as an nn.Module."
                    )
            for parameter in optimizer.state:
                if not isinstance(parameter, Tensor):
                    raise ValueError(
                        f"{kind} has a state under {parameter!r}, which isn't a parameter. Checkpoints have states by "
                        f"parameters' names, and would lose it. Keep it as an option of the parameter groups "
                        f"(group['step'])."
                    )
                name = self._names.get(parameter, "")
                if name in now and now[name] is not parameter:
                    raise ValueError(
                        f"{kind} has already stepped '{name}', which is divided now, so its state doesn't fit. Make it "
                        f"in configure_optimizers. To continue a run, pass ckpt_path."
                    )

    def refuse_kept(self, module: nn.Module) -> None:
        """Refuse a module that keeps a parameter of the whole module, or its id, though another one has its name."""
        now = dict(module.named_parameters(remove_duplicate=False))
        replaced = {name for number, name in self._names_by_id.items() if id(now.get(name)) != number}
        for path, part in module.named_modules() if replaced else ():
            for key, name in self._kept_by(part):
                if name in replaced:
                    raise ValueError(
                        f"'{f'{path}.{key}' if path else key}' keeps the parameter '{name}', or its id. Under "
                        f"{self._strategy} each rank's part takes its place, and what is kept is no longer trained. "
                        f"Keep names, and look them up by self.get_parameter(name) where they are used."
                    )

    def refuse_kept_by(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Refuse an optimizer that keeps parameters, or their ids, beside its groups and its state. A rank steps parts
        or wholes in their place, or has only some of them. It is also refused if its class saves more than torch's do:
        checkpoints have states by parameters' names."""
        now = {id(parameter): name for name, parameter in module.named_parameters()}
        held = [optimizer]
        for each in held:  # it grows
            held += (kept for kept in vars(each).values() if isinstance(kept, Optimizer))
            for key, name in self._kept_by(each, now):
                if key not in ("param_groups", "state"):
                    raise ValueError(
                        f"{type(each).__name__} keeps the parameter '{name}', or its id, in '{key}'. Under "
                        f"{self._strategy} a rank steps parts or wholes in the place of parameters, and doesn't have "
                        f"all of them, so what is kept isn't what is stepped. Note it in an option of a parameter "
                        f"group, in optimizer.state[parameter] or on the parameter, or use strategy='ddp'."
                    )
        has_format = type(optimizer).state_dict is not Optimizer.state_dict
        more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})) if has_format else []
        if more:
            raise ValueError(
                f"{type(optimizer).__name__}.state_dict() adds {more} to torch's format. A checkpoint for every layout "
                f"has what optimizer.state and the parameter groups have, and would lose it. Keep it in "
                f"optimizer.state[parameter] or as an option of the groups, or use strategy='ddp'."
            )

    def _kept_by(self, owner: object, now: Mapping[int, str] = MappingProxyType({})) -> Iterator[tuple[str, str]]:
        """An object's attributes that have a parameter, or its id, and the parameter's name. ``now`` are the names of
        the present ones."""
        for key, kept in vars(owner).items():
            for leaf in _leaves(kept):
                # A parameter isn't looked up by its id, which may have been that of one that is gone.
                before = self._names_by_id.get(leaf) if type(leaf) is int else self._names.get(leaf)
                name = now.get(leaf if type(leaf) is int else id(leaf), before)
                if name is not None:
                    yield key, name


def _leaves(kept: Any, depth: int = 3) -> Iterator[Any]:
    """The integers and parameters in containers, at most ``depth`` deep; of dictionaries the keys, too. A container of
    more than 10,000 items is left out: it is data."""
    if depth and isinstance(kept, (dict, list, tuple, set, frozenset)):
        if len(kept) > 10_000:
            return
        for each in (*kept, *kept.values()) if isinstance(kept, dict) else kept:
            yield from _leaves(each, depth - 1)
    elif type(kept) is int or isinstance(kept, nn.Parameter):
        yield kept
