"""Who holds which part of a module, by names: the result of cutting it (``candidate.py``). ``stage.py`` acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_parallel.pipeline.traced import Call


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

    def holders_of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or a buffer."""
        if name in self.owners:
            return self.owners[name]
        return next((self.units[unit] for unit in self.units if name.startswith(f"{unit}.")), tuple(range(self.stages)))

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters (by first name) that several stages hold, whose gradients must be summed over these stages."""
        return {name: self.owners[name] for name in dict.fromkeys(self.aliases.values()) if len(self.owners[name]) > 1}
