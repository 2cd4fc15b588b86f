"""One way to cut a module: where the chain of layers is cut, and which stage holds what then.

The calls of layers (``layers.py``), in the order in which they are shared out (``order.py``), form the *chain*, and a
chunk owns a piece of it. A layer that is called twice is in it twice. The calls of other units go with the next layer
after them, or with the last one::

    called      embed  blocks.0  blocks.1 | blocks.2  blocks.3  norm  head
    chunk                0                |             1

- A unit that is called on both sides of a cut is held by the stages of both chunks: each runs its own calls, and its
  gradients are summed, like those of a tied weight. A stage that has both chunks holds it once. So one layer called
  twelve times, or a recurrent decoder, can be cut. Where a cut elsewhere is nearly as even, it is taken instead. No cut
  falls between the calls of a unit that collects statistics (BatchNorm), or changes what it holds in each call (a
  counter): two copies would differ, and chunks see microbatches in another order.
- A parameter that is read outside its module, as in ``F.linear(x, embed.weight)``, is held where it is read, too.
- So is one that a parameter is updated from outside the modules, as a mean teacher's is from the student's.
- A *loose* parameter hangs directly on an open module (a position embedding made with ``nn.Parameter``, or a list of
  such). Every stage holds it. It is usually small.
- A parameter with several names (tied weights) is held by every stage that holds one of the names.
- A module that the step doesn't call goes where its parameters are read, or else with the last stage, where the step
  ends.

Modules without parameters and state run everywhere, except in an open ``nn.Sequential``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

from torch import nn

from lightning_parallel.absent.origins import origin_of_parameter, parameter_of
from lightning_parallel.cuts.balance import Balance, bounds_of
from lightning_parallel.cuts.layers import Layers
from lightning_parallel.cuts.order import shared_out
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.tracing.trace import Trace
from lightning_parallel.values import first_few

TOGETHER = 1.1  # the calls of a unit stay together if the largest chunk grows by no more than this
UNEVEN = 1.4  # the largest chunk may be this much larger than the mean before layers are opened for a better cut


class Candidate:
    """A trace cut into chunks.

    Attributes:
        units: the names of the modules that were taken as a whole, by their ids.
        bounds: the bounds between the chain's calls; None if the chain has fewer calls than there are chunks.
        largest: the cost of the largest chunk, as a multiple of the mean; infinite without bounds, or if a stage's
            chunks cost nothing.
    """

    def __init__(
        self, modules: Layers, seen: Trace, placement: Placement, balance: Balance, *, keep_together: bool
    ) -> None:
        self.seen = seen
        self._module, self._placement, self._balance = modules.module, placement, balance
        self._chunks = chunks = len(placement)
        self.units = modules.units
        self._calls = [seen.calls[i] for i in shared_out(seen)]
        called = [call.unit for call in self._calls]
        among = modules.among(list(dict.fromkeys(called)), chunks)
        self._chain = [i for i, name in enumerate(called) if name in among]  # indices of calls of layers
        # For each call of a unit, the place in the chain of the layer that it goes with: the next one, or the last.
        self._positions = [min(bisect_left(self._chain, i), len(self._chain) - 1) for i in range(len(called))]
        self._uncalled = list(modules.uncalled(set(called)))
        self._named = modules.named
        self._cost = self._costs()
        allowed = self._allowed(keep_together)
        self.bounds: list[int] | None = None
        self.largest = float("inf")
        if chunks == 1:
            self.bounds, self.largest = [0, len(self._chain)], 1.0
        elif 1 + sum(allowed[:-1]) >= chunks and self._chain:
            self.bounds = bounds_of(self._cost, chunks, balance, allowed)
            sizes = self._sizes()
            if {stage for stage, size in zip(placement, sizes, strict=True) if size} == {*placement}:
                self.largest = chunks * max(sizes) / sum(sizes)

    @classmethod
    def best(
        cls, modules: Layers, seen: Trace, placement: Placement, balance: Balance, keep_together: bool
    ) -> Candidate:
        """The better of two candidates: the one that keeps the calls of each unit in one chunk, unless its largest
        chunk is much larger; with ``keep_together`` whatever its size."""
        if not isinstance(balance, str):  # the user has said where the cuts are
            return cls(modules, seen, placement, balance, keep_together=False)
        together = cls(modules, seen, placement, balance, keep_together=True)
        apart = cls(modules, seen, placement, balance, keep_together=False)
        has_to = keep_together and together.bounds is not None
        return together if has_to or together.largest <= TOGETHER * apart.largest else apart

    def worth_opening(self, modules: Layers) -> str | None:
        """The unit to be opened for a more even cut, or None."""
        by_hand = not isinstance(self._balance, str) or self._balance == "layers"
        if self.largest <= UNEVEN or (self.bounds is not None and by_hand):
            return None
        inside = {call.unit: call.inside for call in self._calls}
        costs: dict[str, float] = {}
        of_chunks = [] if self.bounds is None else self._sizes()
        for i, call in enumerate(self._calls):
            if self.bounds is None or of_chunks[self._chunk(self._positions[i])] == max(of_chunks):
                costs[call.unit] = costs.get(call.unit, 0) + self._cost_of(i)
        worth = [n for n in costs if modules.can_open(n, inside[n]) and 2 * self._chunks * costs[n] > sum(self._cost)]
        if self.bounds is None and not worth:
            worth = [n for n in costs if modules.can_open(n, inside[n])]
        return max(worth, key=lambda name: costs[name], default=None)

    def refusal(self) -> Exception:
        """The error that says why there is no cut: the step's own if it ended the trace before the last layer."""
        if self.seen.stopped is not None and self._uncalled and len(self._chain) < self._chunks:
            return self.seen.stopped
        names = list(dict.fromkeys(self._calls[i].unit for i in self._chain))
        most = 1 + sum(self._allowed(keep_together=False)[:-1]) if self._chain else 1
        advice = "name finer layers with `layers`" if self._named else "other axes"
        calls_of = "" if most <= len(names) else "calls of "
        stages = max(self._placement) + 1
        each = self._chunks // stages
        several = "" if each == 1 else f" with {each} chunks each"
        fewer = [f"at most {most // each} stages"] if most // each > 1 else []
        fewer += ["one chunk each ('1f1b')"] if most >= stages and each > 1 else []
        use = f"use {', or '.join([*fewer, advice])}."
        collecting = next(filter(self._collects, self._spans()), None)
        if collecting is not None and len(names) >= self._chunks:
            return ValueError(
                f"stages={stages}{several}, but the model can't be cut between the calls of '{collecting}', which a "
                f"step calls several times: it collects statistics of its inputs, so one stage has to make all of "
                f"them. Call it once, on all inputs together (torch.cat), or {use}"
            )
        return ValueError(
            f"stages={stages}{several}, but the model has only {max(most, len(names))} {calls_of}layers to share out "
            f"({first_few(map(repr, names))}): {use}"
        )

    # -- along the chain -----------------------------------------------------------------------------------------

    def _chunk(self, position: int) -> int:
        assert self.bounds is not None
        return next(c for c, end in enumerate(self.bounds[1:]) if position < end)

    def _sizes(self) -> list[int]:
        """The cost of each chunk."""
        assert self.bounds is not None
        return [sum(self._cost[a:b]) for a, b in pairwise(self.bounds)]

    def _cost_of(self, call: int) -> int:
        """The cost of the call with this index. Further calls of a unit cost no more parameters, unless it is a layer:
        then its calls are divided among chunks."""
        traced = self._calls[call]
        if self._balance == "operations":
            return traced.operations
        if traced.call > 0 and call not in self._chain:
            return 0
        return sum(p.numel() for p in self._module.get_submodule(traced.unit).parameters())

    def _costs(self) -> list[int]:
        """The cost of each call in the chain, with what goes with it."""
        costs = [0] * len(self._chain)
        if not self._chain:
            return costs
        for i, position in enumerate(self._positions):
            costs[position] += self._cost_of(i)
        for name in self._uncalled if self._balance != "operations" else ():
            costs[-1] += sum(p.numel() for p in self._module.get_submodule(name).parameters())
        return costs

    def _allowed(self, keep_together: bool) -> list[bool]:
        """Whether a cut may fall after each call in the chain. It may not fall between the calls of a unit that
        collects statistics or changes what it holds, since two copies would differ; with ``keep_together``, not between
        the calls of any unit."""
        allowed = [True] * len(self._chain)
        for unit, (first, last) in self._spans().items():
            if keep_together or self._collects(unit):
                allowed[first:last] = [False] * (last - first)
        return allowed

    def _spans(self) -> dict[str, tuple[int, int]]:
        """The units that are called at several places in the chain, each with the first and the last of these."""
        spans: dict[str, tuple[int, int]] = {}
        for call, position in zip(self._calls, self._positions, strict=True):
            first, _ = spans.get(call.unit, (position, position))
            spans[call.unit] = first, position
        for unit in self.seen.beyond & spans.keys():  # after a value that only the last chunk has
            if self._collects(unit):
                spans[unit] = spans[unit][0], len(self._chain) - 1
        return {unit: (first, last) for unit, (first, last) in spans.items() if first < last}

    def _collects(self, unit: str) -> bool:
        """Does the unit collect statistics of its inputs, as BatchNorm does, or change what it holds in each call?"""
        changes = (name for name, settles in self.seen.own_updates.items() if not settles)
        return _collects(self._module.get_submodule(unit)) or any(name.startswith(f"{unit}.") for name in changes)

    # -- who owns what -------------------------------------------------------------------------------------------

    def partition(self, recompute: bool) -> Partition:
        """The partition that follows from the bounds, which must exist. ``recompute``: layers run again in the
        backward."""
        calls, bounds = self._calls, self.bounds
        assert bounds is not None
        chunk_of = [self._chunk(position) for position in self._positions]
        running: dict[str, set[int]] = {}  # the chunks that call a unit
        for call, chunk in zip(calls, chunk_of, strict=True):
            running.setdefault(call.unit, set()).add(chunk)
        for name in self.seen.beyond & running.keys():  # after a value that only the last chunk has
            running[name].add(self._chunks - 1)
        read = self._read_outside(chunk_of)
        for name in self._uncalled:
            names = {f"{name}.{key}" for key, _ in self._module.get_submodule(name).named_parameters()}
            running[name] = set().union(*(read.get(n, set()) for n in names)) or {self._chunks - 1}

        first_names: dict[int, str] = {}
        tensors = dict(self._module.named_parameters(remove_duplicate=False))
        aliases = {name: first_names.setdefault(id(parameter), name) for name, parameter in tensors.items()}
        # By identity, since a module may have several names, of which one lies in a unit and one doesn't.
        places: dict[int, set[int]] = {}
        for name, ran in running.items():
            for part in self._module.get_submodule(name).modules():
                places.setdefault(id(part), set()).update(ran)
        reads: dict[str, set[int]] = {}  # the chunks that are known to read a parameter, by its first name
        loose: set[str] = set()
        for name, first in aliases.items():
            chunks = places.get(id(self._module.get_submodule(name.rpartition(".")[0])))
            if chunks is None:
                loose.add(first)
            reads.setdefault(first, set()).update(chunks or (), read.get(name, ()))
        everywhere = set(range(self._chunks))
        uses = {first: everywhere if first in loose else chunks for first, chunks in reads.items()}
        held = {name: {self._placement[chunk] for chunk in chunks} for name, chunks in uses.items()}
        self._hold_where_updated(held)
        return Partition(
            layers=tuple(calls[i].unit for i in self._chain),
            bounds=tuple(bounds),
            placement=self._placement,
            units={name: tuple(sorted(chunks)) for name, chunks in running.items()},
            calls={call.key: chunk for call, chunk in zip(calls, chunk_of, strict=True)},
            owners={name: tuple(sorted(held[aliases[name]])) for name in tensors},
            uses={name: frozenset(chunks) for name, chunks in uses.items()},
            aliases=aliases,
            loose={name: tuple(sorted({self._placement[chunk] for chunk in reads[name]})) for name in sorted(loose)},
            direct=frozenset(call.unit for call in calls if call.direct),
            draw_on_host=frozenset(call.unit for call in calls if call.draws_on_host),
            operations=self._summed(chunk_of, [call.operations for call in calls]),
            held=self._summed(chunk_of, [call.returned if recompute else call.computed for call in calls]),
            computed=self._summed(chunk_of, [call.computed for call in calls]),
            buffers=self._buffers_read(read, running),
        )

    def _summed(self, chunk_of: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
        """The sums over each chunk's calls."""
        sums = [0] * self._chunks
        for chunk, value in zip(chunk_of, values, strict=True):
            sums[chunk] += value
        return tuple(sums)

    def _hold_where_updated(self, held: dict[str, set[int]]) -> None:
        """Have a stage that holds a parameter also hold what that is updated from."""
        sources = [
            (update.name, source)
            for update in self.seen.updates
            for source in map(parameter_of, update.needs)
            if update.name in held and source in held
        ]
        for _ in sources:  # a chain of updates has at most as many links
            for name, source in sources:
                held[source] |= held[name]

    def _buffers_read(
        self, read: Mapping[str, set[int]], running: Mapping[str, set[int]]
    ) -> dict[str, tuple[int, ...]]:
        """The stages of the buffers that the code around their units reads. One that its unit changes isn't among
        them: elsewhere it would stay as it is."""
        found: dict[str, tuple[int, ...]] = {}
        for name in dict(self._module.named_buffers()).keys() & read.keys() - self.seen.own_updates.keys():
            unit = next((unit for unit in running if name.startswith(f"{unit}.")), None)
            # torch's kernels update running statistics unseen.
            if unit is not None and not _collects(self._module.get_submodule(name.rpartition(".")[0])):
                found[name] = tuple(sorted({self._placement[chunk] for chunk in running[unit] | read[name]}))
        return found

    def _read_outside(self, chunk_of: Sequence[int]) -> Mapping[str, set[int]]:
        """The chunks in which the code around the units reads a parameter or a buffer, by its name."""
        tensors = chain(self._module.named_parameters(remove_duplicate=False), self._module.named_buffers())
        names = {origin_of_parameter(name): name for name, _ in tensors}
        read: dict[str, set[int]] = {}
        reads = [*zip((call.needs for call in self._calls), chunk_of, strict=True)]
        for needs, chunk in [*reads, (self.seen.end, self._chunks - 1)]:
            for origin in needs & names.keys():
                read.setdefault(names[origin], set()).add(chunk)
        return read


def _collects(unit: nn.Module) -> bool:
    """Does the module collect statistics of its inputs in buffers, as BatchNorm does?"""
    return any(getattr(part, "track_running_stats", False) for part in unit.modules())
