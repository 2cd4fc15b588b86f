"""Cuts a module into stages by traces of a step: the first ones find the best cut, later ones check it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_parallel.absent.origins import FROM_EARLIER_STEP, parameter_of
from lightning_parallel.cuts.balance import Balance
from lightning_parallel.cuts.candidate import Candidate
from lightning_parallel.cuts.layers import Layers, named_layers
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.repeated import refuse_unrepeatable
from lightning_parallel.tracing.trace import Call, Trace
from lightning_parallel.values import first_few


def partition(
    module: nn.Module,
    step: Callable[[], Any],
    stages: int,
    layers: Sequence[str] | None = None,
    balance: Balance = "parameters",
    *,
    placement: Placement | None = None,
    logged: list[Any] | None = None,
    hooks: Callable[[Any], Any] | None = None,
    recompute: bool = False,
    keep_together: bool = False,
    traced: Callable[..., Trace] = trace,
) -> Partition:
    """Cut ``module`` into chunks, and place them on ``stages``.

    Args:
        step: the step to be run in stages, bound to a batch. It runs on absent tensors at least twice: the second time
            with other random numbers, and once more for each unit that is opened.
        layers, balance: as :class:`~lightning_parallel.PipelineStrategy` takes them. ``*`` in a pattern stands for one
            part of a dotted name.
        placement: the stage of each chunk. By default each stage has one chunk.
        logged: a list to which the step appends what it logs.
        hooks: runs the module's hooks around a step, given what the step returns.
        recompute: layers run again in the backward. Those that would do something else then are refused.
        keep_together: one stage holds all of a unit, wherever a cut allows it.
        traced: traces a step, or knows what a trace gave before: the step is traced alike for many cuts.

    Raises:
        ValueError: a pattern matches nothing or what isn't called, ``balance`` doesn't fit, there are more stages than
            layers, the step's calls depend on random numbers, or a stage would have no parameters. Or a layer that is
            to run again would do something else.
        Exception: the step's own, if it has called too few layers by then.
    """
    placement = tuple(range(stages)) if placement is None else placement
    modules = Layers(module, named_layers(module, layers))
    cuts: list[Candidate] = []
    logged = [] if logged is None else logged
    while True:
        logged.clear()
        seen = traced(module, modules.units, step, logged=logged, hooks=hooks, beyond=True)
        if overlapping := modules.overlapping({call.unit for call in seen.calls}):
            modules.open(overlapping)
            continue
        missing = set(modules.named or ()) - {call.unit for call in seen.calls}
        if seen.stopped is None and missing:
            names = first_few(map(repr, sorted(missing)))
            raise ValueError(f"layers: the step doesn't call {names}. Leave out what it doesn't call.")
        cut = Candidate.best(modules, seen, placement, balance, keep_together)
        cuts.append(cut)
        too_large = cut.worth_opening(modules)
        if too_large is None:
            break
        modules.open(too_large)
    # The first of nearly equal ones has larger units.
    best = min(cuts, key=lambda cut: (cut.bounds is None, round(cut.largest, 2)))
    if best.bounds is None:
        raise best.refusal()
    result = best.partition(recompute)
    _check_updates(result, best.seen)
    # The calls after which chunks leave the step, with these chunks: all but the last one.
    last = {result.calls[call.key]: call.key for call in best.seen.calls}
    exits = {call: chunk for chunk, call in last.items() if chunk < result.chunks - 1}
    again = partial(traced, module, best.units, step)
    second = again(seed=1, exits=exits)
    _check_repeatable(best.seen, second)
    if recompute:
        refuse_unrepeatable(module, result.layers, partial(trace, module, best.units, step))
    calls = [call.key for call in best.seen.calls]
    _check_stored(result, calls, {exits[call] for call in second.stored_after if call is not None})
    for call in second.stored_after:
        third = again(seed=2, earlier=[call])
        _check_repeatable(best.seen, third)
        left = set(exits.values()) if call is None else {exits[call]}
        _check_independent(result, third, left, to_its_end=call is None)
    _check_held(result, {name for name, _ in module.named_parameters(remove_duplicate=False)})
    return result


def _check_updates(parts: Partition, seen: Trace) -> None:
    """Refuse parameters that are updated from a buffer that one of their stages doesn't have. Parameters are held where
    others are updated from them; buffers aren't."""
    for update in seen.updates:
        for source in filter(None, map(parameter_of, sorted(update.needs))):
            missing = set(parts.holders_of(update.name)) - set(parts.holders_of(source))
            if missing and source not in parts.owners:
                raise ValueError(
                    f"'{update.name}' is updated from the buffer '{source}', which stage {min(missing)} doesn't have. "
                    f"Leave buffers out of the update, or use fewer stages."
                )


def _check_repeatable(first: Trace, second: Trace) -> None:
    """Refuse steps whose calls are random. Under layer drop each microbatch calls different layers, so what crosses a
    cut can't be known ahead."""
    calls, again = ([call.key for call in seen.calls] for seen in (first, second))
    if calls != again:
        differing = sorted({name for name, _ in set(calls) ^ set(again)})
        names = first_few(map(repr, differing))
        does = f"calls {names} or not" if differing else "calls its layers in one order or another"
        raise ValueError(
            f"The step {does}, by the random numbers that it draws or by what an earlier step has stored. A pipeline's "
            f"stages need the same calls in every microbatch: switch this off (layer drop, as in layerdrop=0.0), or "
            f"drop a layer's output inside the layer's own forward."
        )
    for one, other in zip(first.calls, second.calls, strict=True):
        if one.plain != other.plain:
            raise ValueError(
                f"'{one.unit}' returns numbers, or tensors of a shape, that depend on values: {one.plain} and "
                f"{other.plain} in two dry runs of the step. Other stages can't know them: return tensors of fixed "
                f"shapes."
            )


def _check_independent(parts: Partition, second: Trace, chunks: Collection[int], *, to_its_end: bool) -> None:
    """Refuse what needs something that an earlier step stored on modules. A stage misses what the step stores after one
    of these chunks has left it. If the stage runs several chunks, each of them stores its own value, and what the step
    deletes later stays. ``to_its_end``: no chunk has left that step, so its end is as in one process."""
    stages = {parts.placement[chunk] for chunk in chunks}
    users = [(f"'{call.unit}'", parts.calls[call.unit, call.call], call.needs) for call in second.calls]
    users += [] if to_its_end else [("the end of the step", parts.chunks - 1, frozenset(second.end))]
    for user, chunk, needs in users:
        if FROM_EARLIER_STEP in needs and parts.placement[chunk] in stages:
            raise ValueError(
                f"On stage {parts.placement[chunk]} {user} gets what an earlier step has computed and kept on a module "
                f"(a hidden state, a running mean). A stage leaves the step after its last layer, so it has another. "
                f"Keep it inside a layer's own forward, or use fewer stages, with one chunk each ('1f1b')."
            )


def _check_stored(parts: Partition, calls: Sequence[Call], storing: Collection[int]) -> None:
    """Refuse a step that stores on modules what it computes from layers, where one of these ``storing`` chunks goes on
    past layers of later ones: absent values would be stored, and the stage's next chunk would find them, and decide by
    them (``if self.first is None``)."""
    for chunk in storing:
        last = max(i for i, call in enumerate(calls) if parts.calls[call] == chunk)
        passed = next((unit for unit, call in calls[:last] if parts.calls[unit, call] > chunk), None)
        if chunk < max(parts.chunks_of(parts.placement[chunk])) and passed is not None:
            raise ValueError(
                f"The step keeps what layers return on a module, and calls '{passed}' before {parts.name_of(chunk)} "
                f"has made its last call. A stage with several chunks would keep values that it doesn't have. Take a "
                f"schedule with one chunk a stage ('1f1b'), or keep them after the last layer."
            )


def _check_held(parts: Partition, parameters: set[str]) -> None:
    for stage in range(parts.stages):
        if not any(stage in parts.owners[name] for name in parameters):
            owned = [parts.layers[i] for chunk in parts.chunks_of(stage) for i in parts.layers_of(chunk)]
            raise ValueError(
                f"Stage {stage} of {parts.stages} has no parameters: it owns {first_few(map(repr, owned))}. Use fewer "
                f"stages, or move the cuts (`balance`)."
            )
