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
- So is one that a parameter is updated from outside the modules, as a mean teacher's is from the student's.
- A *loose* parameter hangs directly on an open module (a position embedding made with ``nn.Parameter``, or a list of
  such). Every stage holds it. It is usually small.
- A parameter with several names (tied weights) is held by every stage that holds one of the names.
- A module that the step doesn't call goes where its parameters are read, or else with the last stage, where the step
  ends.

Modules without parameters and state run everywhere, except in an open ``nn.Sequential``. Only names are decided here;
``stage.py`` acts on them.
"""

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

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters (by first name) that several stages hold, whose gradients must be summed over these stages."""
        return {name: self.owners[name] for name in dict.fromkeys(self.aliases.values()) if len(self.owners[name]) > 1}
