"""Undoes what a step writes to its modules besides parameters: a counter, a list of outputs, a metric's state.

It is for runs that don't count: the trace of a step (``trace.py``), a trial, an extra step. Some things can't be found
or copied in general, and are not undone: slots, iterators, files, very large tensors, the state of libraries' objects,
and what lies in containers within an attribute beyond a million items, which is likely somebody's data.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from operator import is_, is_not
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.tensor import AbsentTensor, first_absent
from lightning_parallel.private.torch.modules import buffers_of, parameters_of
from lightning_parallel.private.torch.tensors import tree_leaves, version_of
from lightning_parallel.tracing.own_generators import LIBRARIES, globals_beside, is_own_generator, set_state, state_of

_MANY = 10_000  # items; those of a longer container are put back, but not looked into
_MANY_IN_ALL = 1_000_000  # items of containers within one attribute; about a tenth of a second, and 8 MB
_DEEP = 3  # containers in containers, of those that several parts share
_MANY_SHARED = 100_000  # items of these; about a tenth of a second for each of their uses
_LARGE = 2**26  # bytes; a larger tensor is somebody's data

OF_MODULES = frozenset(vars(nn.Module()))  # attributes that torch keeps

# Of these exact types nothing is kept: they can't be written to.
_IMMUTABLE = frozenset({int, float, bool, complex, str, bytes, type(None)})

CHANGEABLE = (dict, list, set, deque)
_CONTAINERS = (*CHANGEABLE, tuple)
_DICTIONARIES = (dict, OrderedDict)

_NOTHING = object()

_Held = dict[Any, Any] | list[Any]


class StateKept:
    """A context after which things are as before: attributes of a module and of its parts, and the tensors, arrays,
    lists, dictionaries, sets and objects (other than libraries') that are found there, to any depth. Of parameters,
    which are large, only those that have been replaced are put back. Of the parts ``apart``, :meth:`written` leaves out
    the state."""

    def __init__(self, module: nn.Module, apart: Iterable[nn.Module] = ()) -> None:
        self._module = module
        self._modules = {id(m): m for m in module.modules()}
        self._owners = {id(vars(m)): key for key, m in self._modules.items()}
        self._apart = {id(m) for part in apart for m in part.modules()}
        self._containers: list[tuple[Any, _Held, bool]] = []  # with what they held; is it of no part `apart`?
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []  # with their states

    def __enter__(self) -> StateKept:
        seen = set(map(id, self._module.parameters()))
        # With the attribute in which it was found, by its id; 0: the module's own. Outer containers come first.
        waiting = deque[tuple[Any, bool, int]]((vars(m), key not in self._apart, 0) for key, m in self._modules.items())
        waiting += [(generator, True, 0) for generator in globals_beside([*self._modules.values()])]
        within = Counter[int]()  # an attribute: items so far
        while waiting:
            value, looked_at, attribute = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _DICTIONARIES and not value:  # as most are that a module has for hooks
                self._containers.append((value, {}, looked_at))
            elif isinstance(value, Tensor):
                # A tensor of another layout can't be compared, and is hardly ever written to.
                plain = value.layout is torch.strided and not (value.is_meta or value.is_nested)
                if plain and not isinstance(value, AbsentTensor) and value.nbytes <= _LARGE:
                    self._tensors.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                if value.nbytes <= _LARGE:
                    self._arrays.append((value, value.copy()))
            elif not isinstance(value, _CONTAINERS) and is_own_generator(value):
                self._generators.append((value, state_of(value)))
            elif within[attribute] < _MANY_IN_ALL and (held := self._contents(value)) is not None:
                if attribute:
                    within[attribute] += len(held)
                if not isinstance(value, tuple):
                    self._containers.append((value, held, looked_at))
                if isinstance(held, dict) and isinstance(value, nn.Module):
                    # A module hidden in a list or a dictionary: its weights may be large, and aren't copied.
                    held = {name: item for name, item in held.items() if item is not parameters_of(value)}
                if len(held) <= _MANY:
                    items = [item for item in _items(held) if type(item) not in _IMMUTABLE]
                    waiting.extend((item, looked_at, attribute or id(item)) for item in items)
        return self

    def _contents(self, value: Any) -> _Held | None:
        """A copy of a container's or an object's contents; None if it is neither."""
        if isinstance(value, _CONTAINERS):
            return copied(value)
        if isinstance(value, nn.Module):
            return None if id(value) in self._modules else dict(vars(value))  # a metric in a plain dictionary
        library = type(value).__module__.partition(".")[0] in LIBRARIES and not isinstance(value, SimpleNamespace)
        return None if library or isinstance(value, type) or not hasattr(value, "__dict__") else dict(vars(value))

    def absent(self) -> Iterator[AbsentTensor]:
        """The absent tensors that were found, besides parameters and buffers."""
        own = {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        for _, held, _ in self._containers:
            for item in _items(held):
                if isinstance(item, AbsentTensor) and id(item) not in own:
                    yield item

    @property
    def generators(self) -> list[Any]:
        """The random generators that were found, among them those that are global variables beside the modules."""
        return [generator for generator, _ in self._generators]

    def written(self) -> Iterator[AbsentTensor]:
        """The absent tensors that have been stored there so far."""
        for _, held, now in self._changed(of_apart=False):
            before = {id(item) for item in _items(held)}
            new = [item for item in _items(now) if id(item) not in before]
            yield from (leaf for leaf in tree_leaves(new) if isinstance(leaf, AbsentTensor))

    def written_plainly(self) -> set[tuple[int, str]]:
        """The attributes that have changed, such as numbers, by the ids of their parts. Left out are, of parts in
        ``apart``, what several of them share; and of the others absent tensors, the state of metrics, and what has the
        same value again."""
        changed = {id(container) for container, *_ in self._changed()} | self._changed_values()
        written: list[tuple[nn.Module, str, Any, Any]] = []  # the attribute, what it held, and what it holds
        for container, held, _ in self._containers:
            part = self._modules.get(self._owners.get(id(container), 0))
            if part is not None and isinstance(held, dict):
                values = ((name, held.get(name, _NOTHING), value) for name, value in vars(part).items())
                written += [
                    (part, name, before, value)
                    for name, before, value in values
                    if name not in OF_MODULES and (before is not value or id(value) in changed)
                ]
        holders = Counter(id(value) for _, _, before, value in written if before is value)
        kept = {key: part for key, part in self._modules.items() if key in self._apart or not isinstance(part, Metric)}
        buffers = ((key, name, buffer) for key, part in kept.items() for name, buffer in buffers_of(part).items())
        found = {(key, name) for key, name, buffer in buffers if id(buffer) in changed}
        for part, name, before, value in written:
            is_apart = id(part) in self._apart
            differs = holders[id(value)] < 2 if is_apart else before is value or _plain(before) != _plain(value)
            if differs and id(part) in kept and (is_apart or first_absent(value) is None):
                found.add((id(part), name))
        return found

    def shared_by(self, owners: Mapping[int, Collection[str]]) -> set[tuple[int, str]]:
        """The attributes with a container, an object, a tensor or an array that has changed, and that parts of several
        owners hold, by the ids of their parts. ``owners`` has names by the id of each part that is ``apart``; the
        others are of one owner."""
        holders: dict[int, list[tuple[nn.Module, str, Any]]] = {}
        for part in self._modules.values():
            for name, value in vars(part).items():
                if name not in OF_MODULES and type(value) not in _IMMUTABLE and self._entries(value) is not None:
                    holders.setdefault(id(value), []).append((part, name, value))
        no_one: Collection[str | None] = [None]
        several = [
            places
            for places in holders.values()
            if len({owner for part, *_ in places for owner in owners.get(id(part), no_one)}) > 1
        ]
        if not several:
            return set()
        changed = {id(container) for container, *_ in self._changed()} | self._changed_values()
        # Containers that aren't known are of this step, as is what they hold.
        known = {id(container) for container, *_ in self._containers}
        found: set[tuple[int, str]] = set()
        for places in several:
            inside = {id(each): each for _, each, _ in self._within(places[0][2]) if not isinstance(each, tuple)}
            made = (each for key, each in inside.items() if key not in known)
            if not changed.isdisjoint(inside) or any(not isinstance(each, Tensor | np.ndarray) for each in made):
                found.update((id(part), name) for part, name, _ in places)
        return found

    def content_of(self, value: Any) -> Any:
        """What a value holds now, for comparisons: a number itself, a container's items by place; of a tensor a number
        that each write raises, and of a long container one number for all. Absent tensors are left out where the code
        around the parts ``apart`` has the container too: :meth:`written` has these."""
        if isinstance(value, Tensor):
            return id(value), version_of(value)
        if self._entries(value) is None:
            return _plain(value)
        content: dict[Any, Any] = {}
        for path, container, held in self._within(value):
            if len(held) > _MANY:
                content[(*path, _NOTHING)] = hash(tuple(map(id, _items(held))))
                continue
            for key, item in held.items() if isinstance(held, dict) else enumerate(held):
                if not (isinstance(item, AbsentTensor) and id(container) in self._looked_at):
                    content[(*path, key)] = _plain(item)
        return content

    def has_absent(self, value: Any) -> bool:
        """Is there an absent tensor in a value? Unlike :func:`.first_absent` this looks into objects and sets, too."""
        held = (item for *_, items in self._within(value) for item in _items(items))
        return any(isinstance(each, AbsentTensor) for each in (value, *held))

    @cached_property
    def _looked_at(self) -> set[int]:
        """The ids of the containers that the code around the parts ``apart`` has."""
        return {id(container) for container, _, looked_at in self._containers if looked_at}

    def _within(self, value: Any) -> Iterator[tuple[tuple[Any, ...], Any, _Held]]:
        """A container and those in it, each with the way to it and what it holds."""
        waiting, seen, count = deque[tuple[tuple[Any, ...], Any]]([((), value)]), set[int](), 0
        while waiting and count < _MANY_SHARED:
            path, each = waiting.popleft()
            if id(each) in seen or type(each) in _IMMUTABLE or (held := self._entries(each)) is None:
                continue
            seen.add(id(each))
            yield path, each, held
            count += min(len(held), _MANY) + 1
            if len(path) < _DEEP and len(held) <= _MANY:
                items = held.items() if isinstance(held, dict) else enumerate(held)
                waiting.extend(((*path, key), item) for key, item in items)

    def _entries(self, value: Any) -> _Held | None:
        """As :meth:`_contents`, but tensors and arrays have contents too: a number that tells whether they changed."""
        if isinstance(value, AbsentTensor | nn.Parameter):
            return None
        if isinstance(value, np.ndarray):
            return [hash(value.tobytes())] if value.nbytes <= _LARGE and not value.dtype.hasobject else None
        return [version_of(value)] if isinstance(value, Tensor) else self._contents(value)

    def differing(self) -> set[tuple[int, str]]:
        """The attributes that hold something else than before, or a container with other items, by the ids of their
        parts. A new container with the same items is the same."""
        before = {id(container): held for container, held, _ in self._containers}

        def content(value: Any, held: _Held | None) -> Any:
            if not isinstance(value, CHANGEABLE) or held is None:
                return _plain(value)
            keys = [*held] if isinstance(held, dict) else len(held)
            return type(value), keys, [*map(id, _items(held))] if len(held) <= _MANY else None

        found: set[tuple[int, str]] = set()
        for key, part in self._modules.items():
            then, now = before[id(vars(part))], vars(part)
            assert isinstance(then, dict), "of a module"
            for name in then.keys() | now.keys():
                if name not in OF_MODULES and not is_method(part, name):
                    of_class = getattr(type(part), name, _NOTHING)
                    old, new = then.get(name, of_class), now.get(name, of_class)
                    held = copied(new) if isinstance(new, CHANGEABLE) else None
                    if content(old, before.get(id(old))) != content(new, held):
                        found.add((key, name))
        return found

    def goes_on(self) -> bool:
        """Would one more run begin elsewhere? So it is if something has changed, at any depth: a number, a text, a
        tensor that isn't absent, the length of a container, or the order of its items. The order of a dictionary
        doesn't count. Of the parts ``apart`` this says nothing."""
        for _, held, now in self._changed(of_apart=False):
            if isinstance(now, dict) and isinstance(held, dict) and now.keys() == held.keys():
                now = {key: now[key] for key in held}  # layers take its items by their keys
            before, after = _items(held), _items(now)
            if len(before) != len(after):
                return True
            pairs = [*zip(before, after, strict=True)]
            if any(isinstance(b, int | float | str) and a != b for b, a in pairs):
                return True
            # Stand-ins have no origins, so nobody can tell whether they are read again.
            if any(a is not b and _is_plain(a) and _is_plain(b) and not a.equal(b) for b, a in pairs):
                return True
            # The same items in another order: layers take them in turns.
            if any(map(is_not, before, after)) and Counter(map(id, before)) == Counter(map(id, after)):
                return True
        return bool(self._changed_values())

    def _changed(self, *, of_apart: bool = True) -> Iterator[tuple[Any, _Held, _Held]]:
        """The containers that hold something else than before, with what they held and hold; without ``of_apart``, none
        of the parts ``apart``."""
        for container, held, looked_at in self._containers:
            now = self._contents(container) if (looked_at or of_apart) and (held or not _is_empty(container)) else None
            if now is not None:
                same = len(now) == len(held) and all(map(is_, _items(now), _items(held)))
                if not same or (isinstance(now, dict) and list(now) != list(held)):
                    yield container, held, now

    def _changed_values(self) -> set[int]:
        """The ids of tensors and arrays that have other values than before."""
        changed = {id(tensor) for tensor, content in self._tensors if not _equal(tensor, content)}
        return changed | {id(array) for array, values in self._arrays if array.tobytes() != values.tobytes()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for container, held, _ in [*self._changed()]:
            put_back(container, held)
        for tensor, content in self._tensors:
            if tensor.shape != content.shape:
                tensor.data = content
            elif not _equal(tensor, content):
                tensor.data.copy_(content)
        for array, values in self._arrays:
            array[...] = values
        for generator, state in self._generators:
            set_state(generator, state)


def _equal(tensor: Tensor, content: Tensor) -> bool:
    return tensor.shape == content.shape and tensor.equal(content)


def _plain(value: Any) -> Any:
    """A key for comparisons: numbers, texts, devices and tuples of them count by value, all else by identity."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    is_nan = isinstance(value, float) and value != value
    by_value = isinstance(value, int | float | complex | str | bytes | torch.device)
    return "not a number" if is_nan else value if by_value else (object, id(value))


def goes_on(before: Any, now: Any) -> bool:
    """Would another run begin elsewhere, if a value has these contents (:meth:`StateKept.content_of`)? Of a container,
    so it is if a number, a text or the number of its items has changed, at any depth."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return bool(before != now)
    plain = (key for key, value in before.items() if isinstance(value, int | float | str))
    return before.keys() != now.keys() or any(before[key] != now[key] for key in plain)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not (isinstance(value, AbsentTensor) or value.is_meta)


def _is_empty(container: Any) -> bool:
    return isinstance(container, dict | list) and not container


def _items(held: _Held) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else held


def copied(container: Any) -> _Held:
    """What a container holds: a dictionary, or else a list."""
    return dict(container) if isinstance(container, dict) else list(container)


def is_method(part: nn.Module, name: str) -> bool:
    """Has the part a method of this name? In the instance it is one that others have put there for a while."""
    return callable(getattr(type(part), name, None))


def put_back(container: Any, held: _Held) -> None:
    """Give a container, or an object, its old contents again."""
    now = container if isinstance(container, CHANGEABLE) else vars(container)
    try:
        now.clear()
        now.extend(held) if isinstance(now, list | deque) else now.update(held)
    except Exception as error:  # from a class of somebody's own, which doesn't allow it
        name = type(container).__name__
        warnings.warn(f"A dry run of the first step has written to a {name} that can't be reset: {error}", stacklevel=2)
