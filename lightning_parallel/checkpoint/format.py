"""The format of a checkpoint: a directory with torch's distributed checkpoint and one file of plain values.

Tensors are saved under names that don't depend on the layout::

    model/<parameter or buffer>              as the whole model's state_dict() calls it
    optimizer/<index>/<parameter>/<state>    for example optimizer/0/net.0.weight/exp_avg
    rank/<coordinate>/<name>                 what belongs to one place in the layout: states of random generators

All else is in trainer.pt, and in contents.json the names of tied tensors; the first rank writes both. Each rank passes
the names it holds, and reads the names it wants. All ranks must see one file system. A crash leaves a whole checkpoint
there, the old one or the new one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint import directory
from lightning_parallel.checkpoint.agreement import (
    Agreement,
    RankSummary,
    agree,
    check_copies,
    digests,
)
from lightning_parallel.checkpoint.contents import CONTENTS, contents_of
from lightning_parallel.checkpoint.directory import TRAINER, PathLike
from lightning_parallel.checkpoint.fitting import differences, refuse, unknown
from lightning_parallel.checkpoint.optimizers import OptimizerState, State, divided, parts_of
from lightning_parallel.checkpoint.places import coordinates, empty_rank_state, key_in, nearest
from lightning_parallel.checkpoint.reading import (
    MODEL,
    Found,
    check_tensors,
    empty,
    open_directory,
    plain_errors,
    read_tensors,
    read_trainer,
)
from lightning_parallel.checkpoint.sharing import parameter_of, writers
from lightning_parallel.checkpoint.slices import Slices
from lightning_parallel.collectives import (
    Group,
    decided_by_first,
    gather_objects_on_first,
    guarded,
    together,
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint holds besides the model.

    Attributes:
        trainer: what was given to :func:`save` as ``trainer``.
        optimizers: the saved optimizers, with the state of the wanted parameters and the whole model's groups. Tensors
            are on the CPU.
        rank_state: what was saved at this coordinate. If the layout that saved had no such coordinate: that of another
            rank of the same replica; empty if there was no such replica.
        own_options: the options that were saved for each rank. The groups have those of this coordinate, or of the
            first rank if the layout that saved had no such coordinate.
        extra_state: what modules keep besides parameters and buffers, of all modules.
    """

    trainer: dict[str, Any]
    optimizers: list[OptimizerState]
    rank_state: dict[str, Tensor]
    own_options: frozenset[str] = frozenset()
    extra_state: Mapping[str, Any] = field(default_factory=dict)


def save(
    path: PathLike,
    *,
    model: Mapping[str, Tensor],
    optimizers: Sequence[OptimizerState],
    trainer: Mapping[str, Any],
    rank_state: Mapping[str, Tensor],
    coordinate: str,
    group: Group = None,
    own_options: Collection[str] = (),
    order: Sequence[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    extra_state: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a checkpoint, replacing the one at ``path``. Every rank of the group calls it.

    A parameter that several ranks hold is compared, and written by one of them. A buffer that several hold is written
    as the lowest of these ranks has it. Slices and DTensors are written shard by shard.

    Args:
        path: the directory to be written.
        model: parameters and buffers held here, by their names in the whole model.
        optimizers: the state of the parameters held here, and their names in the groups. Every rank has the same
            optimizers, and the same groups with the same options; groups of which it holds no parameter are empty.
        trainer: everything else. The first rank's is saved.
        rank_state: tensors that belong to this coordinate.
        coordinate: this rank's place in the layout, such as "pp0.dp0.tp0".
        group: the ranks that save; None for all, or for a single process.
        own_options: the options of the groups that may differ between ranks, and are saved for each.
        order: the whole model's parameters in their order, for the groups' "params". By default the ranks' parameters
            follow one another.
        aliases: the other names of tied tensors, each with the name under which the tensor is in some rank's ``model``.
            The first rank's are saved.
        extra_state: what modules here have in their ``state_dict`` besides parameters and buffers, such as what
            ``get_extra_state`` returns. Of modules on several ranks the lowest rank's is saved.

    Raises:
        ValueError: the ranks disagree about shapes or groups, or share a coordinate.
        RuntimeError: copies of one parameter differ, or a rank could not write. What was at ``path`` is untouched.
    """
    path = Path(path)
    tensors, scalars = _by_key(model, [each.state for each in optimizers], rank_state, coordinate)
    groups = [each.param_groups for each in optimizers]
    summaries = gather_objects_on_first(
        RankSummary.of(coordinate, tensors, scalars, groups, own_options, extra_state), group
    )
    agreement: Agreement | None = None

    def begin() -> tuple[str, list[str]]:
        nonlocal agreement
        assert summaries is not None
        agreed = agree(summaries, order)
        new = directory.beside(path)
        directory.begin(path, new)
        agreement = agreed
        return str(new), agreed.copied

    unfinished, copied = decided_by_first(group, begin)
    new = Path(unfinished)
    try:
        shared = _shared_out(model, copied, summaries, group) if copied else {}
        mine = dist.get_rank(group) if dist.is_initialized() else 0
        own = {key: tensor for key, tensor in tensors.items() if shared.get(parameter_of(key) or "", mine) == mine}
        together(group, lambda: _write_tensors(new, own, group))

        def end() -> None:
            _write_rest(new, trainer, agreement, aliases)
            directory.replace(new, path)

        decided_by_first(group, end)
    finally:
        if agreement is not None:
            directory.delete(new)


def _shared_out(
    model: Mapping[str, Tensor], copied: Sequence[str], summaries: Sequence[RankSummary] | None, group: Group
) -> dict[str, int]:
    """Compare the copies of parameters, and return which rank writes each."""
    everyones = gather_objects_on_first(digests(model, copied), group)

    def share() -> dict[str, int]:
        assert summaries is not None and everyones is not None
        check_copies(everyones)
        return writers(summaries, everyones)

    return decided_by_first(group, share)


def load(
    path: PathLike,
    *,
    model: Mapping[str, Tensor],
    parameters: Sequence[str],
    coordinate: str,
    group: Group = None,
    strict: bool = True,
    weights_only: bool = True,
) -> Loaded:
    """Read a checkpoint of any layout. Every rank of the group calls it.

    Args:
        path: the directory, written under any layout.
        model: the tensors held here, by their names in the whole model. They are filled in place and keep their dtypes.
            Those of which this rank holds a shard are :class:`~lightning_parallel.checkpoint.slices.Slices`.
        parameters: the names of the parameters whose optimizer state is wanted here; of a shard, the shard's state.
        coordinate: this rank's place in the layout.
        group: the ranks that load; None for all, or for a single process.
        strict: every tensor in ``model`` must be in the checkpoint, and every tensor there must be in the ``model`` of
            some rank. Otherwise tensors without a counterpart stay as they are.
        weights_only: refuse a checkpoint whose trainer state holds anything but tensors and plain containers:
            unpickling other objects can run code. Turn it off for files that you trust.

    Raises:
        ValueError: on every rank, if there is no checkpoint, or some rank lacks names or finds other shapes.
    """
    reader, found, _ = together(group, lambda: open_directory(Path(path)))
    state = together(group, lambda: read_trainer(Path(reader.path), weights_only))
    report = differences(model, _shapes(found), strict=strict), list(model) if strict else []
    reports = gather_objects_on_first(report, group)
    decided_by_first(group, lambda: _refuse_misfits(path, found, reports or [], strict))

    states = _empty_states(found, parameters, model, len(state["param_groups"]))
    place = nearest(coordinate, coordinates(found))
    rank_state = {} if place is None else empty_rank_state(found, place)
    wanted = {MODEL + name: tensor for name, tensor in model.items() if MODEL + name in found}
    tensors, _ = _by_key({}, states, rank_state, place or "")
    together(group, lambda: check_tensors(reader, wanted | tensors))
    together(group, lambda: read_tensors(reader, wanted | tensors))
    for values in (values for by_name in states for values in by_name.values()):
        values.update({key: value.local for key, value in values.items() if isinstance(value, Slices)})
    for by_name, scalars in zip(states, state["optimizer_scalars"], strict=True):
        for name in (name for name in parameters if name in scalars):
            by_name.setdefault(name, {}).update(scalars[name])
    groups, own = _with_own_options(state["param_groups"], state.get("own_options", {}), coordinate)
    optimizers = [OptimizerState(by_name, of_one) for by_name, of_one in zip(states, groups, strict=True)]
    return Loaded(state["trainer"], optimizers, rank_state, own, state.get("extra_state", {}))


def is_checkpoint(path: PathLike) -> bool:
    """Can a checkpoint be loaded from ``path``?"""
    return directory.find(Path(path)) is not None


def remove(path: PathLike) -> None:
    """Delete a checkpoint, and what crashes may have left of it. One rank calls it."""
    directory.remove(Path(path))


# -- names and shapes --------------------------------------------------------------------------------------------


def _by_key(
    model: Mapping[str, Tensor], states: Sequence[State], rank_state: Mapping[str, Tensor], coordinate: str
) -> tuple[dict[str, Tensor], list[dict[str, dict[str, Any]]]]:
    """All tensors by their keys in the file, and the other values of the optimizers by parameter."""
    tensors, scalars = divided(states)
    tensors |= {MODEL + name: tensor for name, tensor in model.items()}
    tensors |= {key_in(coordinate, name): tensor for name, tensor in rank_state.items()}
    return tensors, scalars


def _shapes(found: Found) -> dict[str, torch.Size]:
    """The shapes of the model's tensors, by name."""
    return {key.removeprefix(MODEL): entry.size for key, entry in found.items() if key.startswith(MODEL)}


def _refuse_misfits(path: PathLike, found: Found, reports: Sequence[tuple[list[str], list[str]]], strict: bool) -> None:
    """Refuse a checkpoint in which ranks have found differences, or that has tensors which no rank holds."""
    problems = [problem for report, _ in reports for problem in report]
    if strict:
        problems += unknown(_shapes(found), (name for _, names in reports for name in names))
    refuse(path, problems)


def _empty_states(
    found: Found, parameters: Iterable[str], model: Mapping[str, Tensor], count: int
) -> list[dict[str, dict[str, Any]]]:
    """Tensors to read the wanted parameters' states of each optimizer into. For a shard they have the shard's shape."""
    wanted = set(parameters)
    result: list[dict[str, dict[str, Any]]] = [{} for _ in range(count)]
    for key, entry in found.items():
        parts = parts_of(key)
        if parts is None or parts[1] not in wanted:
            continue
        index, parameter, name = parts
        like = model.get(parameter)
        if isinstance(like, Slices) and entry.size == like.shape:
            made: Tensor = Slices(_empty_like(like.local, entry.properties.dtype), like.shard)
        elif isinstance(like, DTensor) and entry.size == like.shape:
            made = _empty_like(like, entry.properties.dtype)
        else:
            made = empty(found, key)
        result[index].setdefault(parameter, {})[name] = made
    return result


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype)


def _with_own_options(
    optimizers: list[list[dict[str, Any]]], ranks: Mapping[str, list[list[dict[str, Any]]]], coordinate: str
) -> tuple[list[list[dict[str, Any]]], frozenset[str]]:
    """The groups with the options that were saved for this coordinate, and the names of these options."""
    names = frozenset(key for own in ranks.values() for groups in own for options in groups for key in options)
    if coordinate in ranks:
        pairs = zip(optimizers, ranks[coordinate], strict=True)
        return [[{**group, **own} for group, own in zip(*pair, strict=True)] for pair in pairs], names
    if names:
        warnings.warn(
            f"The optimizer had {', '.join(sorted(names))} for each rank of the layout that saved. This rank "
            f"({coordinate}) was not among them, and goes on with the first one's.",
            stacklevel=2,
        )
    return optimizers, names


# -- files -------------------------------------------------------------------------------------------------------


def _write_tensors(new: Path, tensors: dict[str, Tensor], group: Group) -> None:
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    with plain_errors("write", new):
        guarded(
            save_tensors,
            tensors,
            storage_writer=FileSystemWriter(new, sync_files=True),
            planner=planner,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def _write_rest(
    new: Path, trainer: Mapping[str, Any], agreement: Agreement | None, aliases: Mapping[str, str]
) -> None:
    assert agreement is not None, "the first rank has agreed"
    with _on_disk(new / CONTENTS) as file:
        file.write(contents_of(new, aliases, agreement.extra_state))
    state = {
        "trainer": dict(trainer),
        "optimizer_scalars": agreement.scalars,
        "param_groups": agreement.param_groups,
        "own_options": agreement.own_options,
        "extra_state": agreement.extra_state,
    }
    with _on_disk(new / TRAINER) as file:
        torch.save(state, file)


@contextmanager
def _on_disk(path: Path) -> Iterator[IO[bytes]]:
    """Inside, a file to be written. Afterwards it is flushed to disk."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
