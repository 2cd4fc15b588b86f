"""Finds optimizers that would give other numbers on parts of the parameters.

Elementwise optimizers (SGD, AdamW, ...) give the same. Others treat a matrix as a whole (Muon, LAMB, Adafactor), or
compute numbers over several parameters (Prodigy, a norm of all gradients): on parts they are other optimizers, without
an error. No list of names can be complete. So before training, copies of the user's optimizer make some steps on small
parameters (:mod:`~lightning_parallel.checks.small_optimizer`), once whole, and once divided as the ranks have them::

    whole             one copy           steps   [a, b]
    tensor ranks      a copy for each    steps   [a's first half, b's first half]    [a's second half, b's second half]
    stages            a copy for each    steps   [a]    [b]
    fully sharded     one copy           steps   [a, b] as DTensors, which may compute with the whole
    owners            a copy for each    steps   [a]    [b]    [], for a rank that owns none
    chunks in a V     one copy           steps   [a], then [b]: it holds both, and one has no gradients

Parameter groups that only differ as parts are stepped as wholes, by the ranks that own them
(:mod:`lightning_parallel.optimizers.owners`). If they differ there too, the optimizer is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_parallel.checks.no_collectives import CollectiveError
from lightning_parallel.checks.small_optimizer import Piece, Pieces, Small, Stepped, made_up, stepped
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.seeding import Generators
from lightning_parallel.values import same_value

_TOLERANCE = 1e-7  # of the largest change of a parameter: rounding makes far less, a norm of a half far more


class _UntriedError(Exception):
    """No trial can tell: the message says why."""


def stepped_whole(optimizer: Optimizer, local: LocalModel, layout: Layout, strategy: str) -> set[int]:
    """The indices of the parameter groups whose divided parameters the optimizer has to step as wholes, on the ranks
    that own them. All ranks call it. ``strategy`` is the class's name, for messages.

    Raises:
        ValueError: the optimizer is another one there, too. It names the optimizer, a parameter, the axis, and what
            would work.
    """
    kind = type(optimizer).__name__
    smalls = list(made_up(optimizer, local))
    if not smalls or not (layout.stages > 1 or local.shards or local.is_fully_sharded):
        return set()
    with _generators_of(smalls).kept():
        try:
            whole = _tried(optimizer, smalls)
        except CollectiveError as error:
            raise ValueError(
                f"{kind} under {strategy}: in a step {error}, to divide its work over them, but they have parts of the "
                f"model here. Use its variant for a single process, such as torch.optim.Muon: where ranks divide "
                f"parameters, they divide its work, too."
            ) from error
        except _UntriedError as error:
            rank_zero_warn(
                f"{kind} could not be tried on small parameters ({error}), so nothing is known of it on the parts of "
                f"parameters that the ranks of {strategy} have. If it isn't elementwise, as SGD and AdamW are, it "
                f"trains another model than one process would."
            )
            return set()
        found: set[int] = set()
        for words, divides, copies in _divisions(smalls, layout):
            groups, problem = _differences(optimizer, smalls, whole, copies)
            if groups and divides:
                found |= groups
                _, problem = _differences(optimizer, smalls, whole, _owned(smalls, found), steps=1)
            if problem:
                raise ValueError(
                    f"{kind} under {strategy}: {words}. {problem} Use an optimizer that treats each parameter by "
                    f"itself, such as AdamW or Muon, or strategy='ddp', which leaves every rank all parameters."
                )
    return found


def refuse_steps_apart(optimizer: Optimizer, local: LocalModel, strategy: str) -> None:
    """Refuse an optimizer that trains otherwise if it makes two steps an update, one for each half of its parameters,
    or of which no trial can tell. ``strategy`` is the class's name and the setting that asks for it, for messages."""
    smalls = list(made_up(optimizer, local))
    if not smalls:
        return
    problems: list[str] = []
    with _generators_of(smalls).kept():
        try:
            together, apart = (_tried(optimizer, smalls, steps) for steps in (1, 2))
        except (CollectiveError, _UntriedError) as error:
            why = str(error).rstrip(".")
            problems = [f"Whether it trains as with one step could not be tried on small parameters: {why}."]
        else:
            problems += _unlike(smalls, together, [[value] for value in apart.values]).values()
            # A count may matter later than a trial goes, as that of a long warm-up.
            problems += (
                f"Tried on small parameters, it writes another {key!r} into the options of parameter group {number} "
                f"than with one step."
                for number, (one_step, two_steps) in enumerate(zip(together.groups, apart.groups, strict=True))
                for key, value in one_step.items()
                if key != "params" and not same_value(value, two_steps.get(key))
            )
    if problems:
        raise ValueError(
            f"{type(optimizer).__name__} under {strategy}: in a V it makes two steps an update, one for each of a "
            f"stage's chunks. {problems[0]} Use one that can be tried and keeps what it counts in "
            f"optimizer.state[parameter], such as AdamW, or schedule='1f1b'."
        )


# -- ways to divide parameters -----------------------------------------------------------------------------------


def _divisions(smalls: Sequence[Small], layout: Layout) -> Iterator[tuple[str, bool, list[Pieces]]]:
    """The axes along which ranks lack something: why, in words for messages; whether the axis divides parameters; and
    for each copy of the optimizer the pieces that it sees."""
    cut = [small for small in smalls if small.dim is not None]
    if cut:
        words = f"tensor ranks divide '{cut[0].name}' (tensor_parallel={layout.size('tensor')})"
        yield words, True, [[(small, _half(small.dim, index)) for small in smalls] for index in range(2)]
    if layout.stages > 1:
        words = f"each of {layout.stages} stages has only its own parameters, such as '{smalls[0].name}'"
        yield words, False, [_whole(smalls[index::2]) for index in range(2)]
    sharded = [small for small in smalls if isinstance(small.like, DTensor)]
    if sharded:
        words = f"'{sharded[0].name}' is fully sharded over {layout.size('data')} replicas"
        yield words, True, [[(small, _sharded_as(small.like)) for small in smalls]]


def _owned(smalls: Sequence[Small], groups: set[int]) -> list[Pieces]:
    """What two owners see, and a rank that owns none: of these groups one of each two divided parameters, as a whole;
    else what ranks have."""
    copies: list[Pieces] = []
    for index in range(3):
        pieces: list[tuple[Small, Piece]] = []
        for number, small in enumerate(smalls):
            steps_whole = small.group in groups
            is_divided = small.dim is not None or isinstance(small.like, DTensor)
            if number % 2 == index or not (steps_whole and is_divided):
                pieces.append((small, Tensor.clone if steps_whole else _half(small.dim, index % 2)))
        copies.append(pieces)
    return copies


def _whole(smalls: Sequence[Small]) -> Pieces:
    return [(small, Tensor.clone) for small in smalls]


def _half(dim: int | None, index: int) -> Piece:
    return Tensor.clone if dim is None else lambda whole: whole.tensor_split(2, dim)[index].clone()


def _sharded_as(like: Tensor) -> Piece:
    if not isinstance(like, DTensor):
        return Tensor.clone
    # All ranks have made the same: nothing is sent.
    return lambda whole: distribute_tensor(whole.clone(), like.device_mesh, like.placements, src_data_rank=None)


# -- trials ------------------------------------------------------------------------------------------------------


def _generators_of(smalls: Sequence[Small]) -> Generators:
    return Generators(local_part(smalls[0].like).device)


def _tried(optimizer: Optimizer, smalls: Sequence[Small], steps: int = 0) -> Stepped:
    """As :func:`.stepped` on whole parameters, in which each has to move.

    Raises:
        CollectiveError: the optimizer would talk to other ranks.
        _UntriedError: it fails on small parameters, or leaves some where they were.
    """
    try:
        moved = stepped(optimizer, _whole(smalls), steps)
    except CollectiveError:
        raise
    except Exception as error:  # any: the user's optimizer may need what a trial doesn't have
        raise _UntriedError(f"{type(error).__name__}: {error}") from error
    ways = [(one - small.value).abs().max() for one, small in zip(moved.values, smalls, strict=True)]
    if not all(0 < way < torch.inf for way in ways):
        raise _UntriedError("it left parameters as they were, or made them infinite")
    return moved


def _differences(
    optimizer: Optimizer, smalls: Sequence[Small], whole: Stepped, copies: Sequence[Pieces], steps: int = 0
) -> tuple[set[int], str]:
    """The groups for which the optimizer is another one if its copies see these pieces, and in words what is wrong with
    the first of them."""
    results: dict[int, list[Tensor]] = defaultdict(list)
    for pieces in copies:
        try:
            values = stepped(optimizer, pieces, steps).values
        except Exception as error:  # any: it would come in the first update
            why = f"{type(error).__name__}: {str(error).rstrip('.')}"
            return {small.group for small in smalls}, f"Tried on small parameters, it fails there: {why}."
        for (small, _), value in zip(pieces, values, strict=True):
            results[id(small)].append(value)
    # A rank that owns none has the first part once more.
    found = _unlike(smalls, whole, [results[id(small)][:2] for small in smalls])
    return set(found), next(iter(found.values()), "")


def _unlike(smalls: Sequence[Small], whole: Stepped, parts: Sequence[Sequence[Tensor]]) -> dict[int, str]:
    """The groups with a parameter whose parts aren't those of the whole one, and in words what is wrong with each."""
    found: dict[int, str] = {}
    for small, one, own in zip(smalls, whole.values, parts, strict=True):
        joined = torch.cat([*own], small.dim) if own[0].shape != one.shape else own[0]  # type: ignore[arg-type]
        # Offloaded parameters are on the CPU, and where they are gathered is on a GPU.
        if not (joined.to(one.device) - one).abs().max() <= _TOLERANCE * (one - small.value).abs().max():  # NaN too
            found.setdefault(
                small.group,
                f"Tried on small parameters, it changes what stands for '{small.name}' (parameter group {small.group}) "
                f"otherwise there than in one process.",
            )
    return found
