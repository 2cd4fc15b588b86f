"""Decides which modules a cut leaves whole, and between which it may fall.

A module that the step calls is a *unit* if it has parameters or state, and is taken as a whole, unless it is *opened*:
then its own code runs on every stage, and the modules that it calls are units. The root is always open, and so is what
is made of a list of parts, such as an encoder with its blocks or an ``nn.Sequential``, unless it hangs in a list
itself. (An ``nn.Sequential`` in another one is open too.) What hangs in such a list is a *layer*, and a cut falls after
the call of a layer. Where layers are too few or too large, they are opened in turn (``search.py``)::

    GPT                          open
        embed                    unit
        encoder                  open, made of a list
            blocks.0 .. blocks.5 units, layers
        norm, head               units

Where the step calls fewer such layers than there are stages, all units are layers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from lightning_parallel.tracing.dry_run import names_of
from lightning_parallel.values import first_few

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Layers:
    """The units of a module. ``named`` are the layers that the user has named, None to find them; ``names`` the first
    names of the module's parts, by their ids."""

    def __init__(self, module: nn.Module, named: Sequence[str] | None) -> None:
        self.module = module
        self.named = named
        self.names = names_of(module)
        for name in named or ():
            self.names[id(module.get_submodule(name))] = name
        self._parts = {name: module.get_submodule(name) for name in self.names.values() if name}
        self._with_state = {name for name, part in self._parts.items() if _has_state(part)}
        self._listed = {self.names[id(child)] for parent in module.modules() for child in _in_list(parent)}
        self._opened: set[str] = set()
        if named is None:
            self._open_lists(module)
        else:
            whole = {id(self._parts[name]) for name in named}
            self._opened = {n for n, part in self._parts.items() if whole & {id(p) for p in part.modules()}}
            self._opened -= set(named)
        self._in_sequence = self._parts_of_sequences()

    @property
    def units(self) -> dict[int, str]:
        """The names of the modules that are taken as a whole when they are called, by their ids."""
        names = (self._with_state | self._in_sequence) - self._opened
        return {key: name for key, name in self.names.items() if name in names}

    def open(self, name: str) -> None:
        """Take the modules that a unit calls as units in its place. If it was a layer, they are layers."""
        self._opened.add(name)
        self._in_sequence = self._parts_of_sequences()
        if name in self._listed:
            self._listed.update(n for n in self._with_state if n.startswith(f"{name}."))

    def can_open(self, name: str, inside: Iterable[str]) -> bool:
        """Do the modules that a unit calls (``inside``) hold nearly all of its parameters? The others would be loose. A
        unit that the user has named stays whole."""
        if self.named is not None:
            return False
        parts = {id(p): p.numel() for n in inside for p in self._parts[n].parameters()}
        return len(parts) > 0 and sum(parts.values()) >= 0.9 * sum(p.numel() for p in self._parts[name].parameters())

    def among(self, units: Sequence[str], stages: int) -> set[str]:
        """The layers among the called units: those after which a cut may fall."""
        if self.named is not None:
            return set(self.named) & set(units)
        listed = [name for name in units if name in self._listed]
        return set(listed if len(listed) >= stages and self._any_state(listed) else units)

    def in_lists(self) -> list[str]:
        """The parts of lists that have parameters or state, in the order of registration. This needs no step, so they
        may be called in another order, or not at all."""

        def visit(parent: nn.Module) -> Iterator[str]:
            for child in parent.children():
                name = self.names[id(child)]
                if name in self._opened:
                    yield from visit(child)
                elif name in self._listed & self._with_state:
                    yield name

        return list(dict.fromkeys(visit(self.module)))

    def overlapping(self, units: Iterable[str]) -> str | None:
        """A unit that contains another one; None if there is none."""
        units = list(units)
        ids = {id(self._parts[name]): name for name in units}
        for name in units:
            if any(id(part) in ids for part in self._parts[name].modules() if part is not self._parts[name]):
                return name
        return None

    def uncalled(self, units: Iterable[str]) -> Iterator[str]:
        """The largest parts with state that contain no unit and lie in none."""
        claimed = {id(part) for name in units for part in self._parts[name].modules()}

        def visit(parent: nn.Module) -> Iterator[str]:
            for child in parent.children():
                if id(child) in claimed or isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                    continue
                inside = any(id(part) in claimed for part in child.modules())
                if inside or type(child).forward is nn.Module.forward:
                    yield from visit(child)
                elif self.names[id(child)] in self._with_state:
                    claimed.update(id(part) for part in child.modules())
                    yield self.names[id(child)]

        yield from visit(self.module)

    # -- what is open from the start -----------------------------------------------------------------------------

    def _open_lists(self, parent: nn.Module) -> None:
        for child in parent.children():
            name = self.names[id(child)]
            if name not in self._opened and self._starts_open(parent, child):
                self._opened.add(name)
                self._open_lists(child)

    def _starts_open(self, parent: nn.Module, child: nn.Module) -> bool:
        if type(child).forward is nn.Module.forward:
            return True  # a list, or a mere namespace, isn't called: its parts are
        if _runs_in_order(child):  # it promises to run its parts in order on one value, whoever holds them
            return not isinstance(parent, _LISTS)
        return not isinstance(parent, (*_LISTS, nn.Sequential)) and self._is_made_of_list(child)

    def _is_made_of_list(self, part: nn.Module) -> bool:
        """Do the lists in a part, as deep as attributes lead to them, hold most of its parameters?"""
        listed = [child for child in _lists_below(part) if self._any_state(self.names[id(c)] for c in child)]
        held = {id(p): p.numel() for children in listed if len(children) > 1 for c in children for p in c.parameters()}
        return 2 * sum(held.values()) > sum(p.numel() for p in part.parameters())

    def _parts_of_sequences(self) -> set[str]:
        """The modules that open Sequentials call, with or without parameters."""
        opened = [self.module, *(self._parts[name] for name in self._opened)]
        return {self.names[id(child)] for parent in opened if _runs_in_order(parent) for child in parent.children()}

    def _any_state(self, names: Iterable[str]) -> bool:
        return any(name in self._with_state for name in names)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The dotted names that a pattern matches, in which ``*`` stands for one part, or for some characters of one."""
    regex = re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))
    return [name for name in names if regex.fullmatch(name)]


def named_layers(module: nn.Module, patterns: Sequence[str] | None, setting: str = "layers") -> list[str] | None:
    """The names of modules that match patterns, in their order; None for no patterns. ``setting`` is the setting's
    name, for errors.

    Raises:
        ValueError: a pattern matches nothing or what isn't called, or matches lie inside each other.
    """
    if patterns is None:
        return None
    if isinstance(patterns, str) or not patterns:
        raise ValueError(f"{setting}={patterns!r}: give a list of module names or patterns, such as ['net.blocks.*'].")
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    layers: list[str] = []
    taken: set[int] = set()
    for pattern in patterns:
        matched = matching(pattern, names)
        if not matched:
            lists = [name for name, part in module.named_modules() if isinstance(part, (nn.Sequential, nn.ModuleList))]
            close = difflib.get_close_matches(pattern, names, n=3) or lists[:5] or names[:5]
            raise ValueError(f"{setting}: {pattern!r} matches no module. Did you mean {first_few(map(repr, close))}?")
        for name in matched:
            if id(module.get_submodule(name)) not in taken:  # one module under two names is one layer
                taken.add(id(module.get_submodule(name)))
                layers.append(name)
    for name in layers:
        part = module.get_submodule(name)
        if isinstance(part, _LISTS) and type(part).forward is nn.Module.forward:
            kind = type(part).__name__
            raise ValueError(
                f"{setting}: {name!r} is a {kind}, which isn't called itself: name its modules, '{name}.*'."
            )
        nested = [other for other in layers if other.startswith(f"{name}.")]
        if nested:
            raise ValueError(f"{setting}: {nested[0]!r} is a part of {name!r}: name one of them, not both.")
    return layers


def _has_state(part: nn.Module) -> bool:
    """Does a module have parameters, or buffers that a checkpoint keeps?"""
    return next(part.parameters(), None) is not None or len(part.state_dict(keep_vars=True)) > 0


def _in_list(parent: nn.Module) -> list[nn.Module]:
    """The parts of a list if it has more than one."""
    children = list(parent.children())
    return children if isinstance(parent, (*_LISTS, nn.Sequential)) and len(children) > 1 else []


def _lists_below(part: nn.Module) -> Iterator[list[nn.Module]]:
    for child in [part, *part.children()]:
        if children := _in_list(child):
            yield children
        elif child is not part:
            yield from _lists_below(child)


def _runs_in_order(container: nn.Module) -> bool:
    as_documented = isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward
    return as_documented and len(list(container.children())) > 1
