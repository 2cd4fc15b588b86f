"""What a step does, seen by running it once on absent tensors: which modules it calls, and what each needs of others.

Parameters are absent, so next to nothing is stored or computed (``absent_forward.py`` has the exceptions). Every value
carries its *origins*, what it was computed from. Some modules are taken as a whole: a call of such a *unit* is noted,
with the origins of its inputs. The code around the units runs as it stands::

    step                            the trace
    h = self.embed(ids)             embed      needs nothing
    h = self.block(h)               block      needs the output of 'embed'
    p = self.embed.weight.norm()
    return loss(h) + p              the end    needs the output of 'block', parameter 'embed.weight'

``partitioning.py`` decides by this who runs what, and ``survey.py`` what crosses the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_parallel.pipeline.absent import AbsentTensor, AbsentValueError
from lightning_parallel.pipeline.absent_forward import ContainerWrittenError
from lightning_parallel.pipeline.absent_module import METRIC_STATE, everything_absent
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.plain_values import uses_told
from lightning_parallel.pipeline.seeding import TorchGenerators, host_generators_kept, seed_host_generators
from lightning_parallel.pipeline.traced import Call, Carried, Place, PlainRead, Trace
from lightning_parallel.pipeline.watch import LeftStep, Questions, Watch, origins_in

LEFT = "what an earlier step has left on a module"  # an origin


def trace(
    module: nn.Module,
    is_unit: Callable[[str], bool],
    step: Callable[[], Any],
    *,
    names: dict[int, str] | None = None,
    logged: Sequence[Any] = (),
    seed: int = 0,
    hooks: Callable[[Any], Any] | None = None,
    timed_on: torch.device | None = None,
    leaving: Container[Call] = (),
    twice: Container[str] = (),
    plain_values: bool = False,
) -> Trace:
    """Watch one step. If an error ends it, the trace tells what was called before: perhaps the rest works on
    values only.

    Args:
        module: the module whose parts ``step`` calls.
        is_unit: tells by name whether a called module is taken as a whole.
        step: the user's step, bound to a batch.
        names: of the module's parts, by their ids; by default the first name of each.
        logged: a list in which ``step`` leaves what it logs.
        seed: of the random numbers that the step draws meanwhile.
        hooks: what runs around each step, given what the step returns. Its errors don't count.
        timed_on: where to measure how long calls take; None to measure nothing.
        leaving: the calls in question for :attr:`Trace.kept`.
        twice: the units in question for :attr:`Trace.unrepeatable`.
        plain_values: if modules keep other values than absent tensors in the step, look at a second one, to see who
            uses them.
    """
    with _without_values(module, is_unit, names, seed) as scene:
        watch = scene.watch(Questions(timed_on, leaving, twice=twice))
        seen = scene.follow(watch, step, logged, hooks)
        return scene.with_plain_values(seen, step) if plain_values else seen


def trace_after(
    module: nn.Module,
    is_unit: Callable[[str], bool],
    step: Callable[[], Any],
    after: Call | None,
    *,
    names: dict[int, str] | None = None,
    seed: int = 0,
) -> Trace:
    """Watch the second of two steps, of which the first ends after a call; None: at its end. What the first has left on
    modules has the origin :data:`LEFT`. The other arguments are as in :func:`trace`."""
    with _without_values(module, is_unit, names, seed) as scene:
        first = scene.watch(Questions(until=after))
        with first.installed(scene.parts, scene.absent), suppress(Exception, LeftStep):  # any: a trace has told it
            step()
        for left in scene.state.written():
            left.memory.origins = frozenset([LEFT])
        return scene.follow(scene.watch(Questions()), step, (), None)


def names_of(module: nn.Module) -> dict[int, str]:
    """The first name of each part, by its id."""
    return {id(part): name for name, part in module.named_modules()}


@dataclass(frozen=True)
class _Scene:
    """A module without values, in which steps can be watched.

    Attributes:
        names: of the module's parts, by their ids.
        is_unit: tells by name whether a called module is taken as a whole.
        parts: of the module.
        absent: its parameters, by name.
        state: what steps leave on modules.
    """

    names: dict[int, str]
    is_unit: Callable[[str], bool]
    parts: list[nn.Module]
    absent: dict[str, AbsentTensor]
    state: StateKept

    def watch(self, questions: Questions) -> Watch:
        return Watch(self.names, self.is_unit, self.state, questions)

    def units(self) -> list[nn.Module]:
        return [part for part in self.parts if self.is_unit(self.names[id(part)])]

    def metrics(self) -> Iterator[nn.Module]:
        """Those of units. They are computed after the step, as those of the code around."""
        yield from {part: None for unit in self.units() for part in unit.modules() if isinstance(part, Metric)}

    def follow(
        self, watch: Watch, step: Callable[[], Any], logged: Sequence[Any], hooks: Callable[[Any], Any] | None
    ) -> Trace:
        end: set[str] = set()
        stopped: Exception | None = None
        output: Any = None
        with watch.installed(self.parts, self.absent):
            try:
                output = step()
                end |= origins_in(output)
            except ContainerWrittenError:
                raise  # wherever it is, some stage would miss what is written
            except AbsentValueError as error:
                stopped = error
                end |= error.origins
            except Exception as error:  # any: it is the step's, and whoever asked for the trace decides what it means
                stopped = error
            end |= origins_in((logged, watch.end(), [vars(metric) for metric in self.metrics()]))
            if hooks is not None and stopped is None:
                with watch.around_step(), suppress(Exception):  # any: what they do with values can't be seen here
                    hooks(output)
        return Trace(
            tuple(watch.calls),
            frozenset(end),
            watch.escapes,
            watch.writes,
            frozenset(watch.overwriting),
            tuple(watch.updates),
            tuple(map(tuple, watch.draws.values())),
            (),
            (),
            frozenset(watch.unrepeatable),
            stopped,
            frozenset(watch.kept),
        )

    def with_plain_values(self, seen: Trace, step: Callable[[], Any]) -> Trace:
        """The trace, with who uses what modules keep besides absent tensors."""
        of_units, around = self.state.written_apart(), self.state.numbers_written()
        if not of_units and not around:
            return seen
        watch = self.watch(Questions())
        units = {id(inner): self.names[id(part)] for part in self.units() for inner in part.modules()}
        reads: list[PlainRead] = []
        uses: dict[str, tuple[list[Place], list[Place]]] = {}

        def told(part: nn.Module, attribute: str, assigned: bool) -> None:
            name = self.names[id(part)]
            if part not in of_units:
                uses.setdefault(f"{name}.{attribute}".lstrip("."), ([], []))[assigned].append(watch.place)
            elif not assigned and not watch.is_under_way(part):
                reads.append(PlainRead(units[id(part)], name, attribute, watch.place))

        with watch.installed(self.parts, self.absent), uses_told(of_units | around, told), suppress(Exception):
            step()  # any error: the trace has told it
        for metric in self.metrics():
            if metric in of_units and origins_in(vars(metric)) <= {METRIC_STATE}:  # it was updated with stand-ins
                reads.append(PlainRead(units[id(metric)], self.names[id(metric)], None, watch.place))
        carried = [
            Carried(name, tuple(read), tuple(written or read))
            for name, (read, written) in uses.items()
            if read and (not written or read[0].calls <= written[0].calls)
        ]
        return replace(seen, plain_reads=tuple(reads), carried=tuple(carried))


@contextmanager
def _without_values(
    module: nn.Module, is_unit: Callable[[str], bool], names: dict[int, str] | None, seed: int
) -> Iterator[_Scene]:
    names = names or names_of(module)
    parts = [part for part in module.modules() if part is not module]
    units = [part for part in parts if is_unit(names[id(part)])]
    with (
        everything_absent(module, units) as absent,
        StateKept(module, apart=units) as state,
        TorchGenerators(torch.device("cpu")).seeded(seed),
        host_generators_kept(),
        torch.compiler.set_stance("force_eager"),
    ):
        seed_host_generators(seed)
        yield _Scene(names, is_unit, parts, absent, state)
