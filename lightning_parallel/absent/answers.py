"""Answers for a module that another chunk runs, with absent tensors in the structure that the module itself returns.

The module's own ``forward`` is run on absent tensors. Some forwards can't run like that: they need values (the tokens
of each expert), write into tensors that they made, or call a kernel that has no version without values. Such a module
is run once on *stand-ins*, ordinary tensors of the right shapes, for parameters as for inputs, and only the structure
of what it returns is kept. This takes the memory of that one module for a moment, and its numbers mean nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.module import everything_absent
from lightning_parallel.absent.on_meta import Argument, meta_of
from lightning_parallel.absent.origins import INPUT, origin_of
from lightning_parallel.absent.tensor import AbsentMemory, AbsentTensor, AbsentValueError, absent_like
from lightning_parallel.interception import Interception, Invocation, can_intercept
from lightning_parallel.private.torch.modules import buffers_of, forward_hooks, parameters_of
from lightning_parallel.private.torch.tensors import (
    asks_for_memory,
    subclass_functions_disabled,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    version_of,
)
from lightning_parallel.ranks.writes import digest
from lightning_parallel.seeding import Generators

ANSWERS_KEPT = 32  # of one module, for the inputs that came last

_DEVICES = ("cpu", "cuda")
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, Enum)
_SETTINGS = (int, float, str)  # attributes of these types are settings of a module: a size, a rate, a mode


class _Answer(NamedTuple):
    """An answer: its leaves, with tensors as meta tensors, and an :class:`Argument` for each object that the module was
    given; the device, and the structure, which is None for a single leaf."""

    leaves: list[Any]
    device: torch.device
    structure: Any


class AbsentForward:
    """The ``forward`` of a module that another chunk runs.

    The module is run once for each signature of its inputs and for each state of its own settings. After that, a call
    costs a look-up. A module that makes an object (a cache, an output of a class that torch doesn't know) is run each
    time, since the caller may write to the object. So is a module that returns a float, which may change from batch to
    batch (an annealed factor), wherever it is kept. Nothing is drawn from the generators that the stage's own layers
    use. With ``has_values``, the module's parameters and buffers are here, for another chunk; its forward is run
    without them.
    """

    def __init__(self, module: nn.Module, name: str, has_values: bool = False) -> None:
        self._module = module
        self._forward = module.forward
        self._name = name
        self._has_values = has_values
        self._answers: OrderedDict[Any, _Answer] = OrderedDict()  # by signature and settings
        self._settings: list[tuple[dict[str, Any], str]] = []  # each by its submodule's attributes and its name

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: int = 0) -> Any:
        """What the module's call number ``call`` in a step, counted from 0, returns. Not to be compiled."""
        # Autocast decides about the dtypes of operations, on any device.
        autocast = *map(torch.is_autocast_enabled, _DEVICES), *map(torch.get_autocast_dtype, _DEVICES)
        of_call = (_signature(args), _signature(kwargs), self._module.training, *autocast)
        now = [x if isinstance(x := own.get(name), _SETTINGS) else None for own, name in self._settings]
        key = (*of_call, *now)
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        else:
            attributes = map(vars, self._module.modules())
            self._settings = [(own, name) for own in attributes for name in own if isinstance(own[name], _SETTINGS)]
            before = [own[name] for own, name in self._settings]
            key = (*of_call, *before)  # as they are before a forward that counts its calls
            answer = self._ask(args, kwargs)
            if self._has_values:  # which counts the calls of its own chunk
                for (own, name), value in zip(self._settings, before, strict=True):
                    own[name] = value
            if all(isinstance(x, (Tensor, Argument, *_PLAIN)) and not isinstance(x, float) for x in answer.leaves):
                self._answers[key] = answer
            if len(self._answers) > ANSWERS_KEPT:  # a counter among the inputs makes a new signature in each call
                self._answers.popitem(last=False)
        origins = frozenset([origin_of(self._name, call)])

        leaves = [*answer.leaves]
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):  # a new one: what the caller writes to it must not reach the next answer
                leaves[i] = AbsentTensor(x, answer.device, AbsentMemory(origins))
            elif isinstance(x, Argument):
                leaves[i] = tree_leaves((args, kwargs))[x.index]
        return leaves[0] if answer.structure is None else tree_unflatten(leaves, answer.structure)

    def without_values(self) -> AbstractContextManager[Any]:
        """Inside, the module's parameters and buffers are absent."""
        return everything_absent(self._module, [self._module]) if self._has_values else nullcontext()

    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Answer:
        # Parameters were made absent outside of inference mode, where torch can't divide them into views.
        with torch.inference_mode(False), torch.no_grad(), Generators(torch.device("cpu")).kept():
            with self.without_values(), _parts_asked(self._module):
                out = asked(Invocation(self._module, self._forward, args, kwargs), INPUT)
        leaves, structure = tree_flatten(out)
        inputs = tree_leaves((args, kwargs))
        device = next((x.device for x in (*inputs, *leaves) if isinstance(x, Tensor)), torch.device("cpu"))
        given = {id(x): Argument(i) for i, x in enumerate(inputs) if not isinstance(x, (Tensor, *_PLAIN))}
        own = [given.get(id(x), meta_of(x)) for x in leaves]
        return _Answer(own, device, None if structure.is_leaf() else structure)


class ContainerWrittenError(RuntimeError):
    """A module writes into a list or a dictionary that it is given. Where the module is absent, nothing would be
    written."""


def asked(call: Invocation, origin: str, written: Callable[[Tensor], None] | None = None) -> Any:
    """What a module without values returns for inputs without values. If it needs values, it runs on stand-ins. It may
    draw random numbers.

    Args:
        origin: the origin of its inputs while it runs.
        written: called with each input tensor that the module changes in place. Lists and dictionaries that it is given
            may not be changed then.

    Raises:
        AbsentValueError: it needs values, and stand-ins would do harm: somebody else's hooks inside would see them.
        ContainerWrittenError: it writes into a list or a dictionary.
    """
    try:
        return _watched(call, _absentees(call.inputs, origin), written)
    except RuntimeError as error:
        if not (isinstance(error, AbsentValueError) or asks_for_memory(error)):
            raise
        if any(forward_hooks(part) > 0 for part in call.module.modules() if part is not call.module):
            raise
    with _on_stand_ins(call.module):
        return _watched(call, tree_map(stand_in, call.inputs), written)


def _watched(call: Invocation, inputs: Any, written: Callable[[Tensor], None] | None) -> Any:
    """Run a module on copies of its inputs, and find which of them it writes to."""
    pairs = [
        (one, other, version_of(other))
        for one, other in zip(tree_leaves(call.inputs), tree_leaves(inputs), strict=True)
        if isinstance(one, Tensor) and one is not other
    ]
    held = [] if written is None else [(each, _items(each)) for each in _containers(inputs)]
    output = call.forward(*inputs[0], **inputs[1])
    for each, items in held:
        now = _items(each)
        if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
            raise ContainerWrittenError(
                f"A {type(call.module).__name__} writes into a {type(each).__name__} that it is given. On the stages "
                f"where the module is absent nobody would: return what it adds, and let the caller put it there."
            )
    for one, other, version in pairs:
        if version_of(other) != version:
            torch.autograd.graph.increment_version(one)  # whoever asks the module around sees it too
            if written is not None:
                written(one)
    return output


def _containers(tree: Any) -> Iterator[list[Any] | dict[Any, Any]]:
    """The plain lists and dictionaries in nested arguments. ``**kwargs`` itself belongs to the callee."""
    args, kwargs = tree
    waiting = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        if type(value) in (list, dict):
            yield value
        if type(value) in (list, dict, tuple):
            waiting.extend(_items(value))


def _items(container: Any) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


@contextmanager
def _parts_asked(module: nn.Module) -> Iterator[None]:
    """Inside, each part of the module answers for itself, so that only the parts that need values run on stand-ins."""

    def answer(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, AbsentTensor) for x in (*tree_leaves((args, kwargs)), *part.parameters())):
            return forward(*args, **kwargs)
        return _absentees(asked(Invocation(part, forward, args, kwargs), INPUT), INPUT)

    parts = Interception()
    try:
        for part in module.modules():
            if part is not module and can_intercept(part):
                parts.instead(part, partial(answer, part, part.forward))
        yield
    finally:
        parts.remove()


def _absentees(tree: Any, origin: str) -> Any:
    return tree_map(lambda x: absent_like(x, origin) if isinstance(x, Tensor) else x, tree)


@contextmanager
def _on_stand_ins(module: nn.Module) -> Iterator[None]:
    """Inside, absent parameters and buffers of the module and its parts are stand-ins. What is written to these counts
    as written to the absent ones."""
    kept: list[tuple[nn.Module, str, AbsentTensor]] = []
    made: dict[int, Tensor] = {}  # a parameter with two names is one tensor
    before: dict[int, Tensor] = {}  # digests
    try:
        for part in module.modules():
            states = part.metric_state if isinstance(part, Metric) else {}
            for name, tensor in [*parameters_of(part).items(), *buffers_of(part).items(), *states.items()]:
                if isinstance(tensor, AbsentTensor):
                    kept.append((part, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = stand_in(tensor)
                        before[id(tensor)] = digest(made[id(tensor)])
                    setattr(part, name, made[id(tensor)])  # as in make_absent
        yield
    finally:
        for part, name, tensor in kept:
            now = getattr(part, name)
            if now is not made[id(tensor)] or not torch.equal(digest(now), before[id(tensor)]):
                tensor.memory.write(tensor.origins)
            setattr(part, name, tensor)


def stand_in(value: Any) -> Any:
    """For an absent tensor, a stand-in: small random numbers, zeros for integers (which are indices of something), True
    for masks. Other values stay."""
    if not isinstance(value, AbsentTensor):
        return value
    made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return made.fill_(value.dtype is torch.bool)
    made = made.normal_().mul_(0.1)
    return nn.Parameter(made, requires_grad=False) if isinstance(value, nn.Parameter) else made


def _signature(x: Any) -> Any:
    """A key that is equal for inputs of equal structure, shapes and plain values; for other objects their attributes
    count. A deep model has many absent layers, and each needs the key in every microbatch. torch's walk through
    containers takes three times as long; no object inside an object is looked into."""
    if isinstance(x, Tensor):
        with subclass_functions_disabled():
            return (x.shape, x.dtype, x.device)
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_signature, x))
    if isinstance(x, dict):
        return (type(x), *[(key, _signature(value)) for key, value in x.items()])
    if isinstance(x, _PLAIN):
        return (type(x), x)  # 1 == True == 1.0
    leaves, spec = tree_flatten(x)
    if not spec.is_leaf():
        return (str(spec), *map(_signature, leaves))
    if isinstance(x, (type, FunctionType, nn.Module)):
        return x
    own = getattr(x, "__dict__", {})
    return (type(x), *((key, _signature(value)) for key, value in own.items() if isinstance(value, (Tensor, *_PLAIN))))
