"""Traces what a step does, by running it once on absent tensors: which modules it calls, and what each needs of others.

Parameters are absent, so next to nothing is stored or computed (``absent/answers.py`` has the exceptions). Every value
carries its *origins*, what it was computed from. Some modules are taken as a whole: a call of such a *unit* is noted,
with the origins of its inputs. The code around the units runs as it stands::

    step                            the trace
    h = self.embed(ids)             embed      needs nothing
    h = self.block(h)               block      needs the output of 'embed'
    p = self.embed.weight.norm()
    return loss(h) + p              the end    needs the output of 'block', parameter 'embed.weight'

``cuts/search.py`` decides by this who runs what, and ``cuts/flow_of_step.py`` what crosses the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lightning_parallel.absent.answers import ContainerWrittenError
from lightning_parallel.absent.modes import ValuesGuessed
from lightning_parallel.absent.module import everything_absent
from lightning_parallel.absent.origins import FROM_EARLIER_STEP, STEP_OUTPUT
from lightning_parallel.absent.tensor import AbsentValueError
from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.seeding import Generators
from lightning_parallel.tracing.recorder import Recorder, Scene, origins_in, relabelled
from lightning_parallel.tracing.second_run import add_plain_values, add_rest
from lightning_parallel.tracing.snapshot import StateKept
from lightning_parallel.tracing.trace import Call, Trace


def trace(
    module: nn.Module,
    units: Mapping[int, str],
    step: Callable[[], Any],
    *,
    logged: Sequence[Any] = (),
    seed: int = 0,
    hooks: Callable[[Any], Any] | None = None,
    exits: Container[Call] = (),
    earlier: Sequence[Call | None] = (),
    beyond: bool = False,
    plain_values: bool = False,
    calls: int | None = None,
) -> Trace:
    """Trace one step. If an error ends it, the trace has what was called before: the rest may need values.

    Args:
        units: the names of the modules that are taken as a whole when they are called, by their ids.
        logged: a list to which ``step`` appends what it logs.
        seed: the seed of the random numbers that the step draws meanwhile.
        hooks: runs the module's hooks around a step, given what the step returns. They are run after it.
        exits: the calls in question for :attr:`Trace.stored_after` and :attr:`Trace.put_back`.
        earlier: a step runs before it for each of these, and ends after this call (None: at its end). What it stores on
            modules has the origin :data:`FROM_EARLIER_STEP`.
        beyond: if the step needs a value, let it go on with guesses, to find what the rest needs.
        plain_values: if modules keep other values than absent tensors in the step, trace a second one, to find who uses
            them. Steps go on with guesses then, too.
        calls: how many calls the step makes, as far as is known. If it does, ``plain_values`` take one run less.
    """
    with _without_values(module, units, seed) as scene:
        for call in earlier:
            with Recorder(scene, until=call).installed(), suppress(Exception, LeaveStep):  # an earlier trace has it
                step()
            for left in scene.state.written():
                left.memory.origins = frozenset([FROM_EARLIER_STEP])
        recorder = Recorder(scene, exits=exits, last=calls, plain_values=plain_values)
        seen = _followed(scene, recorder, step, logged, hooks)
        if (beyond or plain_values) and isinstance(seen.stopped, AbsentValueError):
            differing = add_rest(scene, seen, step, logged)
        else:
            differing = scene.state.differing() if plain_values else set()
        if plain_values:
            given_back = recorder.differing - differing
            seen.put_back = {f"{scene.names[part]}.{name}".removeprefix(".") for part, name in given_back}
            changed = recorder.changed if len(seen.calls) == calls else None
            add_plain_values(scene, seen, changed, step)
        return seen


def names_of(module: nn.Module) -> dict[int, str]:
    """The first name of each part, by its id."""
    return {id(part): name for name, part in module.named_modules()}


@contextmanager
def _without_values(module: nn.Module, units: Mapping[int, str], seed: int) -> Iterator[Scene]:
    whole = [part for part in module.modules() if id(part) in units]
    with (
        everything_absent(module, whole) as absent,
        StateKept(module, apart=whole) as state,
        Generators(torch.device("cpu")).seeded(seed),
        torch.compiler.set_stance("force_eager"),
    ):
        owners: dict[int, list[str]] = {}
        for part in whole:
            for inner in part.modules():
                owners.setdefault(id(inner), []).append(units[id(part)])
        common = [part for part in module.modules() if len(owners.get(id(part), ())) > 1]
        yield Scene(module, {**names_of(module), **units}, whole, absent, state, owners, common)


def _followed(
    scene: Scene,
    recorder: Recorder,
    step: Callable[[], Any],
    logged: Sequence[Any],
    hooks: Callable[[Any], Any] | None,
) -> Trace:
    seen = recorder.trace
    output: Any = None
    with recorder.installed():
        try:
            output = step()
            seen.end |= origins_in(output)
        except ContainerWrittenError:
            raise  # wherever it is, some stage would miss what is written
        except AbsentValueError as error:
            seen.stopped = error
            seen.end |= error.origins
        except Exception as error:  # any: it is the step's, and the caller decides what it means
            seen.stopped = error
        # Metrics of units are computed after the step, as are those of the code around the units.
        seen.end |= origins_in((logged, recorder.end(), [vars(metric) for metric in scene.metrics()]))
        seen.own_updates = dict.fromkeys(_assigned(scene), False) | seen.own_updates
        # A step that has asked for a value (`loss.item()`) has returned nothing, so hooks get any number. They may
        # call modules, too: that isn't the step's.
        needs_value = isinstance(seen.stopped, AbsentValueError)
        if hooks is not None and (seen.stopped is None or needs_value):
            output = torch.ones(()) if needs_value else relabelled(output, STEP_OUTPUT)
            with recorder.around_step(), ValuesGuessed(lambda tensor: tensor.origins == {STEP_OUTPUT}):
                hooks(output)
    return seen


def _assigned(scene: Scene) -> Iterator[str]:
    """The buffers of units that have been replaced by what was computed from them, such as a running mean."""
    for part in (part for unit in scene.units for part in unit.modules()):
        for key, buffer in buffers_of(part).items():
            name = scene.name_of(part, key)
            before = scene.absent.get(name)
            if before is not None and before is not buffer and before.origins & origins_in(buffer):
                yield name
