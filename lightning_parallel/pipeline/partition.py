"""Which stage of a pipeline owns which part of a module, decided by a look at the step.

The look (``trace.py``) tells the order in which units are called. The calls of layers (``layers.py``) form the *chain*,
and a stage owns a piece of it. A layer that is called twice is in it twice. The calls of other units go with the next
layer that is called after them, or with the last one::

    called      embed  blocks.0  blocks.1 | blocks.2  blocks.3  norm  head
    stage                0                |             1

- A unit that is called on both sides of a cut is held by both stages: each runs its own calls, and its gradients are
  summed, like those of a tied weight. So a shared embedding, two towers with the same weights, or one layer called
  twelve times can be cut. Where a cut elsewhere is nearly as even, it is taken instead. No cut falls between the calls
  of a unit that collects statistics (BatchNorm): two copies would differ.
- A parameter that is read outside its module, as in ``F.linear(x, embed.weight)``, is held where it is read, too.
- A *loose* parameter hangs directly on an open module (a position embedding made with ``nn.Parameter``, or a list of
  such). Every stage holds it. It is usually small.
- A parameter with several names (tied weights) is held by every stage that holds one of the names.
- A module that the step doesn't call goes where its parameters are read, or else with the last stage, where the step
  ends.

Modules without parameters and state run everywhere, except in an open ``nn.Sequential``. Only names are decided here;
``stage.py`` acts on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.absent import origin_of_parameter
from lightning_parallel.pipeline.balance import Balance, bounds_of
from lightning_parallel.pipeline.layers import Layers, enumerated, named_layers
from lightning_parallel.pipeline.trace import LEFT, Call, Trace, trace

UNEVEN = 1.4  # the largest stage may be this much larger than the mean before layers are opened for a better cut


@dataclass(frozen=True)
class Partition:
    """Who owns what, by the names of the original module.

    Attributes:
        layers: the chain: the names of layers in the order of their calls. A layer that is called twice is in it twice.
        bounds: stage s owns ``layers[bounds[s]:bounds[s + 1]]``; ``len(bounds) == stages + 1``.
        units: the stages that hold each unit, by name, in the order of their first calls. The last are modules that the
            step doesn't call.
        calls: the stage of each call of a unit in the step that was looked at.
        owners: for every parameter name, tied names included, the stages that hold the parameter.
        aliases: for every parameter name, the first name of the same parameter. Tied names share one.
        loose: the first names of the parameters that lie in no unit.
        direct: units whose ``forward`` the step calls past their hooks.
        draw_on_host: units that draw from Python's or NumPy's generator.
    """

    layers: tuple[str, ...]
    bounds: tuple[int, ...]
    units: dict[str, tuple[int, ...]]
    calls: dict[Call, int]
    owners: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    loose: frozenset[str]
    direct: frozenset[str]
    draw_on_host: frozenset[str]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def layers_of(self, stage: int) -> range:
        """The indices in ``layers`` of the calls that ``stage`` owns."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    @property
    def outside(self) -> dict[str, tuple[int, ...]]:
        """The stages of the units that are no layers."""
        return {name: stages for name, stages in self.units.items() if name not in self.layers}

    def stage_of(self, call: Call, reached: int) -> int:
        """The stage that runs a call of a unit.

        Args:
            call: perhaps one that the step that was looked at doesn't make.
            reached: the latest stage that has run a call in this step so far.
        """
        planned = self.calls.get(call, -1)
        if planned >= reached:
            return planned
        return next((stage for stage in self.units[call[0]] if stage >= reached), self.units[call[0]][-1])

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters (by first name) that several stages hold, whose gradients must be summed over these stages."""
        return {name: self.owners[name] for name in dict.fromkeys(self.aliases.values()) if len(self.owners[name]) > 1}


def partition(
    module: nn.Module,
    step: Callable[[], Any],
    stages: int,
    layers: Sequence[str] | None = None,
    balance: Balance = "parameters",
    device: torch.device | None = None,
) -> Partition:
    """Cut ``module`` into ``stages``.

    Args:
        module: the whole model.
        step: what is to be run in stages, bound to a batch. It is run on absent tensors at least twice: the second time
            with other random numbers, and once more for each unit that is opened.
        stages: how many stages.
        layers: names or patterns of the layers between which a cut may fall. ``*`` stands for one part of a dotted
            name, as in ``"net.blocks.*"``. None to find them.
        balance: ``"parameters"`` (the largest stage is as small as can be), ``"operations"`` (the same, by the
            floating-point operations of the forward), ``"time"`` (the same, by measured times), ``"layers"`` (equal
            counts), or the number of layers of each stage.
        device: where times are measured; by default on the CPU.

    Raises:
        ValueError: a pattern matches nothing or what isn't called, ``balance`` doesn't fit, there are more stages than
            layers, the step's calls depend on random numbers, or a stage would have no trainable parameters.
        Exception: the step's own, if it has called too few layers by then.
    """
    units = Layers(module, named_layers(module, layers))
    timed_on = (device or torch.device("cpu")) if balance == "time" else None
    cuts: list[_Cut] = []
    while True:
        seen = trace(module, units.is_unit, step, names=units.names, timed_on=timed_on)
        if overlapping := units.overlapping({call.unit for call in seen.calls}):
            units.open(overlapping)
            continue
        if seen.stopped is None:
            _check_called(units.named, seen)
        cut = _Cut.best(module, units, seen, stages, balance)
        cuts.append(cut)
        too_large = cut.worth_opening(units)
        if too_large is None:
            break
        units.open(too_large)
    best = min(cuts, key=lambda cut: round(cut.largest, 2))  # the first of nearly equal ones has larger units
    if best.bounds is None:
        raise best.refusal()
    result = best.partition()
    leaving = _leaving(result)
    second = trace(module, best.is_unit, step, names=units.names, seed=1, leaving=leaving)
    _check_repeatable(best.seen, second)
    for call in second.kept:
        third = trace(module, best.is_unit, step, names=units.names, seed=2, after=[call])
        _check_repeatable(best.seen, third)
        _check_independent(result, third, {leaving[call]} if call is not None else set(leaving.values()))
    _check_trainable(result, {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad})
    return result


class _Cut:
    """A trace cut into stages.

    Attributes:
        seen: the trace.
        is_unit: tells which modules were taken as a whole.
        bounds: between the chain's calls; None if there are too few.
        largest: the cost of the largest stage, as a multiple of the mean.
    """

    def __init__(
        self, module: nn.Module, units: Layers, seen: Trace, stages: int, balance: Balance, keep_together: bool
    ) -> None:
        self.seen = seen
        self._module, self._stages, self._balance = module, stages, balance
        self.is_unit = units.frozen()
        called = [call.unit for call in seen.calls]
        among = units.among(list(dict.fromkeys(called)), stages)
        self._chain = [i for i, name in enumerate(called) if name in among]  # indices of calls of layers
        self._positions = self._positions_of_calls()
        self._uncalled = list(units.uncalled(set(called)))
        self._named = units.named
        self._cost, trainable = self._costs()
        allowed = self._allowed(keep_together)
        self.bounds: list[int] | None = None
        self.largest = float("inf")
        if stages == 1:
            self.bounds, self.largest = [0, len(self._chain)], 1.0
        elif 1 + sum(allowed[:-1]) >= stages and self._chain:
            self.bounds = bounds_of(self._cost, trainable, stages, balance, allowed)
            sizes = self._sizes()
            self.largest = stages * max(sizes) / max(sum(sizes), 1)

    @classmethod
    def best(cls, module: nn.Module, units: Layers, seen: Trace, stages: int, balance: Balance) -> _Cut:
        """The calls of a unit are kept on one stage, where this costs little."""
        if not isinstance(balance, str):  # the user has said where the cuts are
            return cls(module, units, seen, stages, balance, keep_together=False)
        together = cls(module, units, seen, stages, balance, keep_together=True)
        apart = cls(module, units, seen, stages, balance, keep_together=False)
        return together if together.largest <= 1.1 * apart.largest else apart

    def worth_opening(self, units: Layers) -> str | None:
        """The unit to be opened for a more even cut, if there is one."""
        by_hand = not isinstance(self._balance, str) or self._balance == "layers"
        if self.bounds is not None and (by_hand or self.largest <= UNEVEN):
            return None
        costs: dict[str, float] = {}
        largest = [] if self.bounds is None else self._largest_stages()
        for i, call in enumerate(self.seen.calls):
            if self.bounds is None or self._stage(self._positions[i]) in largest:
                costs[call.unit] = costs.get(call.unit, 0) + self._cost_of(i)
        inside = {call.unit: call.inside for call in self.seen.calls}
        worth = [n for n in costs if units.can_open(n, inside[n]) and 2 * self._stages * costs[n] > sum(self._cost)]
        if self.bounds is None and not worth:
            worth = [n for n in costs if units.can_open(n, inside[n])]
        return max(worth, key=lambda name: costs[name], default=None)

    def refusal(self) -> Exception:
        """Why there is no cut."""
        if self.seen.stopped is not None and len(self._chain) < self._stages:
            return self.seen.stopped
        calls = self.seen.calls
        names = list(dict.fromkeys(calls[i].unit for i in self._chain))
        most = 1 + sum(self._allowed(keep_together=False)[:-1]) if self._chain else 1
        advice = "name finer layers with `layers`" if self._named else "other axes"
        return ValueError(
            f"stages={self._stages}, but the model has only {len(names)} layers to share out ({enumerated(names)}): "
            f"use at most {most} stages, or {advice}."
        )

    # -- along the chain -----------------------------------------------------------------------------------------

    def _positions_of_calls(self) -> list[int]:
        """For each call of a unit the place in the chain of the layer that it goes with: the next one, or the last."""
        positions: list[int] = []
        passed = 0
        for i in range(len(self.seen.calls)):
            positions.append(min(passed, len(self._chain) - 1))
            passed += passed < len(self._chain) and self._chain[passed] == i
        return positions

    def _stage(self, position: int) -> int:
        assert self.bounds is not None
        return next(s for s, end in enumerate(self.bounds[1:]) if position < end)

    def _sizes(self) -> list[int]:
        """The cost of each stage."""
        assert self.bounds is not None
        return [sum(self._cost[a:b]) for a, b in pairwise(self.bounds)]

    def _largest_stages(self) -> list[int]:
        sizes = self._sizes()
        return [s for s, size in enumerate(sizes) if size == max(sizes)]

    def _cost_of(self, call: int) -> int:
        """The cost of the call with this index. A unit that is called again costs nothing more in parameters, unless it
        is a layer: then its calls are what the stages share."""
        traced = self.seen.calls[call]
        if self._balance == "operations":
            return traced.operations
        if self._balance == "time":
            return traced.nanoseconds
        if traced.call > 0 and call not in self._chain:
            return 0
        return sum(p.numel() for p in self._module.get_submodule(traced.unit).parameters())

    def _costs(self) -> tuple[list[int], list[bool]]:
        """The cost of each call in the chain, with what goes with it; and whether any of it is trainable."""
        costs, trainable = [0] * len(self._chain), [False] * len(self._chain)
        if not self._chain:
            return costs, trainable
        for i, position in enumerate(self._positions):
            costs[position] += self._cost_of(i)
            unit = self._module.get_submodule(self.seen.calls[i].unit)
            trainable[position] |= any(p.requires_grad for p in unit.parameters())
        for name in self._uncalled if self._balance not in ("operations", "time") else ():
            costs[-1] += sum(p.numel() for p in self._module.get_submodule(name).parameters())
        return costs, trainable

    def _allowed(self, keep_together: bool) -> list[bool]:
        """May a cut fall after each call in the chain? Not between the calls of a unit that collects statistics of its
        inputs: two copies would differ. With ``keep_together``, not between the calls of any unit."""
        allowed = [True] * len(self._chain)
        spans: dict[str, tuple[int, int]] = {}
        for call, position in zip(self.seen.calls, self._positions, strict=True):
            first, _ = spans.get(call.unit, (position, position))
            spans[call.unit] = first, position
        for name, (first, last) in spans.items():
            if keep_together or _collects(self._module.get_submodule(name)):
                allowed[first:last] = [False] * (last - first)
        return allowed

    # -- who owns what -------------------------------------------------------------------------------------------

    def partition(self) -> Partition:
        """What follows from the bounds, which exist."""
        calls, bounds = self.seen.calls, self.bounds
        assert bounds is not None
        last = self._stages - 1
        stage_of = [self._stage(position) for position in self._positions]
        holders: dict[str, set[int]] = {}
        for call, stage in zip(calls, stage_of, strict=True):
            holders.setdefault(call.unit, set()).add(stage)
        read = self._read_outside(stage_of)
        for name in self._uncalled:
            names = {f"{name}.{key}" for key, _ in self._module.get_submodule(name).named_parameters()}
            holders[name] = set().union(*(read.get(n, set()) for n in names)) or {last}

        first_names: dict[int, str] = {}
        tensors = dict(self._module.named_parameters(remove_duplicate=False))
        aliases = {name: first_names.setdefault(id(parameter), name) for name, parameter in tensors.items()}
        # By identity, since a module may have several names, of which one lies in a unit and one doesn't.
        places = {id(p): stages for name, stages in holders.items() for p in self._module.get_submodule(name).modules()}
        everywhere = set(range(self._stages))
        held: dict[str, set[int]] = {}
        loose: set[str] = set()
        for name in tensors:
            stages = places.get(id(self._module.get_submodule(name.rpartition(".")[0])))
            if stages is None:
                loose.add(aliases[name])
            held.setdefault(aliases[name], set()).update(everywhere if stages is None else stages, read.get(name, ()))
        return Partition(
            layers=tuple(calls[i].unit for i in self._chain),
            bounds=tuple(bounds),
            units={name: tuple(sorted(stages)) for name, stages in holders.items()},
            calls={(call.unit, call.call): stage for call, stage in zip(calls, stage_of, strict=True)},
            owners={name: tuple(sorted(held[aliases[name]])) for name in tensors},
            aliases=aliases,
            loose=frozenset(loose),
            direct=frozenset(call.unit for call in calls if call.direct),
            draw_on_host=frozenset(call.unit for call in calls if call.draws_on_host),
        )

    def _read_outside(self, stage_of: Sequence[int]) -> Mapping[str, set[int]]:
        """The stages at which the code around the units reads a parameter, by its name."""
        names = {origin_of_parameter(name): name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        read: dict[str, set[int]] = {}
        reads = [*zip((call.needs for call in self.seen.calls), stage_of, strict=True)]
        for needs, stage in [*reads, (self.seen.end, self._stages - 1)]:
            for origin in needs & names.keys():
                read.setdefault(names[origin], set()).add(stage)
        return read


def _collects(unit: nn.Module) -> bool:
    """Does it collect statistics of its inputs in buffers, as BatchNorm does?"""
    return any(getattr(part, "track_running_stats", False) for part in unit.modules())


def _check_called(named: Sequence[str] | None, seen: Trace) -> None:
    missing = set(named or ()) - {call.unit for call in seen.calls}
    if missing:
        raise ValueError(
            f"layers: the step doesn't call {enumerated(sorted(missing))}. Leave out what it doesn't call."
        )


def _check_repeatable(first: Trace, second: Trace) -> None:
    """Under layer drop each microbatch calls other layers, so what crosses a cut can't be known ahead."""
    calls, again = ([(call.unit, call.call) for call in seen.calls] for seen in (first, second))
    if calls != again:
        raise ValueError(
            f"The step calls {enumerated(sorted({name for name, _ in set(calls) ^ set(again)}))} or not, by the random "
            f"numbers that it draws or by what an earlier step has left. A pipeline's stages need the same calls in "
            f"every microbatch: switch this off (layer drop, as in layerdrop=0.0), or drop a layer's output inside the "
            f"layer's own forward."
        )
    for one, other in zip(first.calls, second.calls, strict=True):
        if one.plain != other.plain:
            raise ValueError(
                f"'{one.unit}' returns numbers, or tensors of a shape, that depend on values: {one.plain} and "
                f"{other.plain} in two looks at the step. Other stages can't know them: return tensors of fixed shapes."
            )


def _leaving(parts: Partition) -> dict[Call, int]:
    """The calls after which stages leave the step, and which stages: all but the last one."""
    last = {stage: call for call, stage in parts.calls.items()}
    return {call: stage for stage, call in last.items() if stage < parts.stages - 1}


def _check_independent(parts: Partition, second: Trace, stages: Collection[int]) -> None:
    """What the code around the units keeps for the next step, after these stages have left it, they don't have; what
    it takes away again after that, they still have."""
    for call in second.calls:
        stage = parts.calls[call.unit, call.call]
        if LEFT in call.needs and stage in stages:
            raise ValueError(
                f"'{call.unit}' on stage {stage} gets what an earlier step has computed and kept on a module (a "
                f"hidden state, a running mean). A stage leaves the step after its last layer, so it has another. Keep "
                f"it inside a layer's own forward, or use fewer stages."
            )


def _check_trainable(parts: Partition, trainable: set[str]) -> None:
    for stage in range(parts.stages):
        if not any(stage in parts.owners[name] for name in trainable):
            owned = [parts.layers[i] for i in parts.layers_of(stage)]
            raise ValueError(
                f"Stage {stage} of {parts.stages} has no trainable parameter: it owns {enumerated(owned)}. Use fewer "
                f"stages, or move the cuts with `balance`, e.g. balance=[...layers of each stage...]."
            )
