"""Refuses steps in which only some chunks do what all have to do.

A chunk leaves the step after its last layer, and the layers of others don't run in it. So it doesn't draw the numbers
that the rest of the step draws from the user's random generators, and it lacks the numbers that other stages' layers
keep. Where a stage runs several chunks, the code around the layers runs once in each of them, for the same microbatch.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from lightning_parallel.cuts.flow import TWICE, FlowError
from lightning_parallel.cuts.placed_step import PlacedStep
from lightning_parallel.values import first_few


def refuse_one_sided(module: nn.Module, step: PlacedStep) -> None:
    """Refuse a step that would make the stages drift apart from one process.

    Raises:
        FlowError: stages would draw, count or update differently.
    """
    _check_buffers(module, step)
    _check_draws(step)
    _check_plain_reads(step)
    _check_carried(step)
    _check_counts(step)
    _check_batch(step)


def _check_buffers(module: nn.Module, step: PlacedStep) -> None:
    """Refuse layers that change a buffer that layers of several stages have: each stage would change its own."""
    parts = step.partition
    names: dict[int, list[str]] = {}  # of a buffer, by its id
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    for known in names.values():
        changed = next((name for name in known if name in step.seen.own_updates), None)
        if changed is None:
            continue
        holders: dict[int, str] = {}  # the first on each chunk
        for call, chunk in zip(step.seen.calls, step.chunks, strict=True):
            if any(name.startswith(f"{call.unit}.") for name in known):
                holders.setdefault(chunk, call.unit)
        stages = {parts.placement[chunk]: chunk for chunk in sorted(holders, reverse=True)}
        if len(stages) > 1:
            where = (f"'{holders[chunk]}' on {parts.name_of(chunk)}" for chunk in sorted(stages.values()))
            raise FlowError(
                f"A layer changes the buffer '{changed}', which {first_few(where)} share: each stage would change its "
                f"own. Fill it in __init__ if it holds constants, such as a table of positions. Else give each layer a "
                f"buffer of its own, or let one stage have these layers (see `layers` and `balance`)."
            )


def _check_draws(step: PlacedStep) -> None:
    """Refuse a generator that lives longer than a step: each chunk would draw the numbers of the code that it runs."""
    if step.seen.draws and step.partition.chunks > 1:
        raise FlowError(
            "The step draws from a random generator of its own, on a module or global in its file. Each stage would "
            "draw only the numbers of the code that it runs. Draw from torch's default generator, which all stages "
            "follow, or make the generator anew in each step."
        )


def _check_plain_reads(step: PlacedStep) -> None:
    """Refuse reads of what another stage's layer keeps and can't send."""
    stages, name_of = step.partition.placement, step.partition.name_of
    for read in step.seen.plain_reads:
        owners = step.calling(read.unit)
        missing = [chunk for chunk in step.running(read.place) if chunk not in owners]
        if not owners or not missing:
            continue
        owner = min(owners)
        if read.attribute is None:
            raise FlowError(
                f"The metric '{read.module}' is updated inside a layer on stage {stages[owner]}, and depends on values "
                f"in a way that can't be followed to the last stage, where metrics are computed. Update it in the "
                f"step, by what the layer returns (or switch its checks of values off, as nan_strategy='disable' does)."
            )
        if read.is_shared:
            raise FlowError(
                f"'{read.module}', on {name_of(owner)}, changes what its attribute {read.attribute!r} holds, and "
                f"{name_of(missing[0])} uses the same object, which has other contents there. If the object is scratch "
                f"space, or each layer keeps something of its own in it, give each layer an object of its own. Else "
                f"let the layer return what others need, and pass it to them as an argument."
            )
        raise FlowError(
            f"'{read.module}', on {name_of(owner)}, keeps something in its attribute {read.attribute!r}, "
            f"and {name_of(missing[0])} reads it. It can't be sent: it is no tensor, or the layer's forward reads "
            f"values (.item(), an if, torch.where(mask)). Return it beside the layer's output."
        )


def _check_carried(step: PlacedStep) -> None:
    """Refuse what the step keeps for the next one if a stage reads it that doesn't change it, or changes it several
    times."""
    for carried in step.seen.carried:
        readers = {chunk for place in carried.reads for chunk in step.running(place)}
        for place in carried.writes:
            stale = readers.difference(step.running(place))
            if stale:
                raise FlowError(
                    f"The step reads '{carried.name}' on stage {step.partition.placement[min(stale)]}, but changes it "
                    f"after that stage has left the step, so the stage keeps the old value: change it at the beginning "
                    f"of the step, or in a hook such as on_train_batch_end."
                )
        changing = {chunk for place in carried.writes for chunk in step.running(place)}
        stage, times = Counter(step.partition.placement[chunk] for chunk in sorted(changing)).most_common(1)[0]
        if times > 1:
            raise FlowError(
                f"The step reads and changes '{carried.name}', and would change it several times on stage {stage}. "
                f"{TWICE} change it in a hook such as on_train_batch_start, or take a schedule with one chunk a stage "
                f"('1f1b')."
            )


def _check_counts(step: PlacedStep) -> None:
    """Refuse a layer that is called in several chunks and counts its calls: each stage would count its own, and a chunk
    sees microbatches in an order of its own."""
    for name in sorted(step.seen.counts):
        unit = next((call.unit for call in step.seen.calls if name.startswith(f"{call.unit}.")), "")
        chunks = step.calling(unit)
        if len(chunks) > 1:
            raise FlowError(
                f"'{unit}' is called on {first_few(map(step.partition.name_of, sorted(chunks)))}, and each call "
                f"changes its '{name}', as a count does: it would be another one there. Call the layer once in a step, "
                f"on all inputs together (torch.cat), or let one stage make all of its calls (see `layers` and "
                f"`balance`)."
            )


def _check_batch(step: PlacedStep) -> None:
    """Refuse a layer that changes a tensor with values, of the batch or made by the step, where other stages run what
    follows."""
    for index in step.seen.overwriting:
        if any(chunk != step.partition.chunks - 1 for chunk in step.chunks[index:]):
            raise FlowError(
                f"'{step.seen.calls[index].unit}' on {step.partition.name_of(step.chunks[index])} changes a tensor in "
                f"place that the step gives it, of the batch or made by the step. Other stages still have the old "
                f"values: set inplace=False there, or hand it a clone."
            )
