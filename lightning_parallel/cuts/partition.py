"""Which stage holds which part of a module, by names: the result of cutting it (``candidate.py``), as ``stage.py`` uses
it.

The calls of a step are cut into *chunks*, and each chunk is placed on a stage. With one chunk a stage they are the
same. What runs is described by chunk, what is held by stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from lightning_parallel.ranks.layout import Placement
from lightning_parallel.tracing.trace import Call


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The chunks and stages that run and hold each part of the module, by the names of the original module. By default
    there is one chunk, of which nothing is known.

    Attributes:
        layers: the chain: the names of layers in the order in which their calls are shared out (``order.py``). A layer
            that is called twice is in it twice.
        bounds: chunk c owns ``layers[bounds[c]:bounds[c + 1]]``; ``len(bounds) == chunks + 1``.
        units: the chunks that call each unit, by name, in the order of their first calls. The last are modules that the
            step doesn't call.
        calls: the chunk of each call of a unit in the traced step, in the order of the calls.
        owners: for every parameter name, tied names included, the stages that hold the parameter.
        uses: for every parameter by its first name, the chunks that may add to its gradient.
        aliases: for every parameter name, the first name of the same parameter. Tied names share one.
        loose: the stages that read each parameter that lies in no unit, by its first name, as far as the trace shows.
        direct: units whose ``forward`` the step calls past their hooks.
        draw_on_host: units that draw from Python's or NumPy's generator.
        operations: floating-point ones, of the forward of each chunk, on a microbatch.
        held: the bytes that each chunk holds of a microbatch from its forward to its backward: an estimate.
        computed: the bytes of all that each chunk computes in its forward.
        buffers: the stages that hold each buffer which the step reads outside its unit.
    """

    owners: dict[str, tuple[int, ...]]
    uses: dict[str, frozenset[int]]
    aliases: dict[str, str]
    layers: tuple[str, ...] = ()
    bounds: tuple[int, ...] = (0, 0)
    placement: Placement = (0,)
    units: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: dict[Call, int] = field(default_factory=dict)
    loose: dict[str, tuple[int, ...]] = field(default_factory=dict)
    direct: frozenset[str] = frozenset()
    draw_on_host: frozenset[str] = frozenset()
    operations: tuple[int, ...] = (0,)
    held: tuple[int, ...] = (0,)
    computed: tuple[int, ...] = (0,)
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def whole(cls, module: nn.Module) -> Partition:
        """One chunk of everything, without a dry run of the step: nothing is intercepted, and no costs are known."""
        names: dict[int, str] = {}
        aliases = {name: names.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
        uses = dict.fromkeys(names.values(), frozenset({0}))
        return cls(owners=dict.fromkeys(aliases, (0,)), uses=uses, aliases=aliases)

    @property
    def chunks(self) -> int:
        """The number of chunks on all stages."""
        return len(self.placement)

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    def chunks_of(self, stage: int) -> list[int]:
        """The chunks that a stage runs."""
        return [chunk for chunk, place in enumerate(self.placement) if place == stage]

    def layers_of(self, chunk: int) -> range:
        """The indices in ``layers`` of the calls that a chunk owns."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    @property
    def outside(self) -> dict[str, tuple[int, ...]]:
        """The chunks of the units that aren't layers."""
        return {name: chunks for name, chunks in self.units.items() if name not in self.layers}

    def chunk_of(self, call: Call, earliest: int) -> int:
        """The chunk that runs a call of a unit.

        Args:
            call: a call, which the traced step may not have made.
            earliest: the earliest chunk that can run it.
        """
        planned = self.calls.get(call, -1)
        if planned >= earliest:
            return planned
        return next((chunk for chunk in self.units[call[0]] if chunk >= earliest), self.units[call[0]][-1])

    def name_of(self, chunk: int) -> str:
        """The name of a chunk in errors: that of its stage, if the stage has no other chunk."""
        stage = self.placement[chunk]
        return f"stage {stage}" if len(self.chunks_of(stage)) == 1 else f"stage {stage} (chunk {chunk})"

    def stages_with(self, unit: str) -> tuple[int, ...]:
        """The stages that hold a unit."""
        return tuple(sorted({self.placement[chunk] for chunk in self.units[unit]}))

    def holders_of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or a buffer."""
        for known in (self.owners, self.buffers):
            if name in known:
                return known[name]
        inside = (unit for unit in self.units if name.startswith(f"{unit}."))
        return next(map(self.stages_with, inside), tuple(range(self.stages)))

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters (by first name) that several stages hold, whose gradients must be summed over these stages."""
        return {name: self.owners[name] for name in dict.fromkeys(self.aliases.values()) if len(self.owners[name]) > 1}
