"""Replaces the forwards of a module's parts while a step runs, and records what happens (``trace.py``).

A module is taken as a whole, as a leaf module is in torch.fx, or its own code runs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torchmetrics import Metric

from lightning_parallel.absent.answers import asked
from lightning_parallel.absent.origins import (
    changed_by,
    from_parameters,
    inside_of,
    origin_of,
    parameter_of,
    shared_with,
)
from lightning_parallel.absent.tensor import AbsentMemory, AbsentTensor
from lightning_parallel.interception import Interception, Invocation, LeaveStep, can_intercept
from lightning_parallel.private.torch.modules import forward_hooks
from lightning_parallel.private.torch.tensors import tensors_in, tree_leaves, tree_map
from lightning_parallel.tracing.operations import OperationsNoted, nbytes_of
from lightning_parallel.tracing.own_generators import ON_HOST, GeneratorsWatched
from lightning_parallel.tracing.plain_values import Attribute, ChangedAttributes
from lightning_parallel.tracing.snapshot import StateKept
from lightning_parallel.tracing.trace import Call, Escape, Place, Trace, TracedCall, Update
from lightning_parallel.values import first_few


@dataclass(frozen=True)
class Scene:
    """A module without values, in which steps are traced.

    Attributes:
        names: the names of the module's parts, by their ids.
        units: the parts that are taken as a whole.
        absent: its absent parameters, and buffers of units, by name.
        state: the state of its modules, which steps write to.
        owners: the names of the units that have a part, by its id.
        common: the parts that several units have.
    """

    module: nn.Module
    names: dict[int, str]
    units: list[nn.Module]
    absent: dict[str, AbsentTensor]
    state: StateKept
    owners: dict[int, list[str]]
    common: list[nn.Module]

    def name_of(self, part: nn.Module, attribute: str) -> str:
        return f"{self.names[id(part)]}.{attribute}".removeprefix(".")

    def metrics(self) -> dict[nn.Module, None]:
        """The metrics of units."""
        return dict.fromkeys(part for unit in self.units for part in unit.modules() if isinstance(part, Metric))

    def changed(self) -> ChangedAttributes:
        """What the modules keep that isn't as it was when the tracing began."""
        return ChangedAttributes.now(self.module, self.state, self.owners)


class Recorder:
    """Records in a trace what happens in one step.

    Args:
        exits: the calls after each of which to record what the step has stored on modules.
        until: the call after which to end the step; None for its end.
        last: the number of the step's last call, counted from 1, as far as is known.
        plain_values: record :attr:`differing`, too.

    Attributes:
        changed: the attributes that have changed by the end of that call; None if the step doesn't get there. The code
            after it may put them back, but earlier stages don't run that code.
        differing: the attributes that have had other contents at one of the ``exits``.
    """

    def __init__(
        self,
        scene: Scene,
        *,
        exits: Container[Call] = (),
        until: Call | None = None,
        last: int | None = None,
        plain_values: bool = False,
    ) -> None:
        self.trace = Trace()
        self.changed: ChangedAttributes | None = None
        self.differing: set[Attribute] = set()
        self._last, self._plain_values = last, plain_values
        self._scene, self._names, self._state = scene, scene.names, scene.state
        self._units = set(map(id, scene.units))
        self._exits, self._until = exits, until
        self._generators = GeneratorsWatched(scene.state.generators)
        self._count: Counter[str] = Counter()
        self._announced: Counter[int] = Counter()  # by id: calls whose forward is yet to come
        self._in_step = True
        self._depth = 0  # of modules inside a unit
        self._hooked: set[int] = set()  # ids of units with hooks of the user's
        self._in_hooks = False  # of the unit that was called last
        self._unit: nn.Module | None = None  # the unit under way
        self._inside: set[str] = set()  # modules that it has called
        self._read: set[str] = set()  # origins of what it and these returned, before they get their own

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the calls of the module's parts, and the changes of its parameters, are recorded."""
        absent, watched = self._scene.absent, Interception()
        announced = register_module_forward_pre_hook(self._announce)
        own = {name: tensor.origins for name, tensor in absent.items()}
        try:
            for name, tensor in absent.items():
                tensor.memory.listeners = (partial(self._updated, name, tensor.memory, own[name]),)
            for part in self._scene.module.modules():
                if part is self._scene.module or not can_intercept(part):
                    continue
                watched.instead(part, partial(self._called, part, part.forward))
                if forward_hooks(part) > 0 and id(part) in self._units:
                    self._hooked.add(id(part))
                    watched.after(part, self._hooks_over, first=False)
            yield
        finally:
            announced.remove()
            watched.remove()
            for name, tensor in absent.items():
                tensor.memory.listeners, tensor.memory.origins = (), own[name]

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Inside, where the hooks around the step run, only updates are recorded."""
        of_step, self.trace = self.trace, Trace(updates=self.trace.updates)
        self._in_step = False
        yield
        self.trace, self._in_step = of_step, True

    def end(self) -> Collection[AbsentTensor]:
        """End the step, and record what it has left on modules."""
        left = [*self._state.written()]
        self.trace.stored_after.update([None] if left else [])
        self.trace.draws = self._generators.drawn()
        return left

    # -- calls of modules ----------------------------------------------------------------------------------------

    def _announce(self, part: nn.Module, args: Any) -> None:
        self._announced[id(part)] += 1

    def _called(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        direct = self._announced[id(part)] == 0
        self._announced[id(part)] -= not direct
        name = self._names[id(part)]
        run = Invocation(part, forward, args, kwargs)
        if self._depth > 0:
            return self._called_inside(name, run)
        if id(part) not in self._units:
            return run.run()
        _refuse_carriers(name, run.inputs)
        needs = origins_in(run.inputs)
        call = name, self._next(name)
        self._unit, self._inside, self._read = part, set(), set()
        host = GeneratorsWatched(ON_HOST)
        computed = from_parameters(*call)
        self.trace.escapes[computed] = Escape(len(self.trace.calls), call, None, frozenset())
        with OperationsNoted() as noted, torch.no_grad(), _parameters_marked(part, computed):
            output = self._asked(run, call)
        self._read |= origins_in(output)
        # A unit may read another one's parameters, which it was given as a module.
        own = origins_in(list(part.parameters()))
        needs |= {origin for origin in self._read - own if parameter_of(origin) is not None}
        output = self._relabelled(output, call)
        self.trace.calls.append(
            TracedCall(
                *call,
                needs=needs,
                tensors=len(tensors_in(output)),
                operations=noted.flops,
                computed=noted.nbytes,
                returned=nbytes_of(output),
                inside=frozenset(self._inside),
                plain=_plain_parts(output),
                draws_on_host=host.drawn(),
                direct=direct,
                in_function=_in_function(),
                in_inference=torch.is_inference_mode_enabled(),
            )
        )
        self._unit, self._in_hooks = None, not direct and id(part) in self._hooked
        if not self._in_hooks:
            self._end_call(call)
        return output

    def _end_call(self, call: Call) -> None:
        """End a unit's call, after the user's hooks on it: a stage leaves the step only then."""
        if call in self._exits:
            self.differing |= self._state.differing() if self._plain_values else set()
            self.trace.stored_after |= {call for _ in self._state.written()}
        if self._in_step and len(self.trace.calls) == self._last:
            self.changed = self._scene.changed()
        if call == self._until:
            raise LeaveStep

    def _hooks_over(self, part: nn.Module, args: Any, output: Any) -> None:
        """Note that a unit's call, and the user's hooks on it, are over."""
        if self._depth == 0 and self._in_hooks:
            self._in_hooks = False
            self._end_call(self.trace.calls[-1].key)

    def _called_inside(self, name: str, run: Invocation) -> Any:
        if self._depth == 1:
            self._inside.add(name)
        if not origins_in(run.inputs) and not any(isinstance(p, AbsentTensor) for p in run.module.parameters()):
            return run.run()  # on stand-ins, or on shapes alone
        call = name, self._next(name)
        output = self._asked(run, call)
        self._read |= origins_in(output) | origins_in(run.inputs)
        count = len(tensors_in(output))
        self.trace.escapes[origin_of(*call)] = Escape(len(self.trace.calls), call, count, origins_in(run.inputs))
        return relabelled(output, origin_of(*call))

    def _asked(self, run: Invocation, call: Call) -> Any:
        inside = inside_of(*call)
        self.trace.escapes[inside] = Escape(len(self.trace.calls), call, None, origins_in(run.inputs))
        is_unit = self._depth == 0
        written = partial(self._written, call) if is_unit else None
        self._depth += 1
        try:
            return asked(run, inside, written)
        except Exception as error:
            if is_unit:
                error.add_note(f"It came in '{call[0]}', in a dry run on tensors without values.")
            raise
        finally:
            self._depth -= 1

    def _next(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name] - 1

    # -- what is written to --------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """The place that the step has reached."""
        if self._depth > 0:
            return Place(len(self.trace.calls), "call")
        return Place(len(self.trace.calls) - 1, "hooks") if self._in_hooks else Place(len(self.trace.calls))

    def is_under_way(self, part: nn.Module) -> bool:
        """Does the part belong to the unit whose call is running?"""
        return self._unit is not None and any(part is each for each in self._unit.modules())

    def _written(self, call: Call, tensor: Tensor) -> None:
        """Record that a unit's call has changed a tensor of the code around it in place. Later stages have it as it was
        before."""
        if isinstance(tensor, AbsentTensor):
            tensor.memory.write(self._write(changed_by(*call), len(self.trace.calls)))
        else:
            self.trace.overwriting.add(len(self.trace.calls))

    def _write(self, origin: str, index: int) -> frozenset[str]:
        self.trace.writes[origin] = index
        return frozenset([origin])

    def _updated(self, name: str, memory: AbsentMemory, own: frozenset[str], settles: bool) -> None:
        if self._depth == 0:
            place = self.place if self._in_step else None
            self.trace.updates.append(Update(name, place, memory.origins - own))
        else:
            self.trace.own_updates[name] = settles and self.trace.own_updates.get(name, True)

    def _relabelled(self, output: Any, call: Call) -> Any:
        """The output as the code around the unit gets it. Tensors that share memory on the unit's own stage cross a cut
        one by one: a write to one of them doesn't change the others there."""
        origins, changed, index = frozenset([origin_of(*call)]), shared_with(*call), len(self.trace.calls)
        sharing: dict[int, list[AbsentMemory]] = {}

        def relabel(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            memory = AbsentMemory(origins)
            if isinstance(leaf, AbsentTensor):
                given = leaf.memory.copy_of
                sharing.setdefault(id(leaf.memory), [] if given is None else [given]).append(memory)
            return AbsentTensor(leaf, leaf.device, memory)

        def written(memory: AbsentMemory, memories: list[AbsentMemory], settles: bool) -> None:
            for other in memories:
                if other is not memory:
                    other.origins = self._write(changed, index)

        relabelled_output = tree_map(relabel, output)
        for memories in sharing.values():
            for memory in memories if len(memories) > 1 else ():
                memory.listeners += (partial(written, memory, memories),)
        return relabelled_output


def origins_in(values: Any) -> frozenset[str]:
    """The origins of the absent tensors in a nested structure."""
    return frozenset().union(*(leaf.origins for leaf in tree_leaves(values) if isinstance(leaf, AbsentTensor)))


def relabelled(output: Any, origin: str) -> Any:
    """The output with absent tensors of this origin in the place of all tensors."""
    origins = frozenset([origin])
    return tree_map(lambda x: AbsentTensor(x, x.device, AbsentMemory(origins)) if isinstance(x, Tensor) else x, output)


@contextmanager
def _parameters_marked(unit: nn.Module, origin: str) -> Iterator[None]:
    """Inside, a unit's parameters have one more origin, and so has what the unit computes from them. Code around the
    unit that computes from them runs on each stage; on other stages, the unit's own code has to be run for this."""
    memories = {id(each.memory): each.memory for each in unit.parameters() if isinstance(each, AbsentTensor)}
    for memory in memories.values():
        memory.origins |= {origin}
    try:
        yield
    finally:
        for memory in memories.values():
            memory.origins -= {origin}


def _plain_parts(output: Any) -> tuple[Any, ...]:
    leaves = tree_leaves(output)
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, (Tensor, int, float, str))
    )


def _in_function() -> bool:
    """Is the forward of an autograd.Function under way, which may make up for gradients in its backward?"""
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not apply:
        frame = frame.f_back
    return frame is not None


def _refuse_carriers(name: str, inputs: Any) -> None:
    """Refuse tensors of a subclass that carries something, such as the names of its columns: what layers of other
    stages return for them wouldn't."""
    for tensor in tensors_in(inputs):
        if not isinstance(tensor, AbsentTensor | nn.Parameter) and type(tensor) is not Tensor and vars(tensor):
            raise ValueError(
                f"'{name}' is given a {type(tensor).__name__}, which carries {first_few(sorted(vars(tensor)))}. "
                f"Where a layer is on another stage, what it returns is a plain tensor. Give layers plain tensors "
                f"(tensor.as_subclass(torch.Tensor)), or use FullyShardedStrategy or strategy='ddp'."
            )
