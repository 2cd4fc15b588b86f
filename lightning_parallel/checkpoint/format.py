"""The format of a checkpoint: a directory with torch's distributed checkpoint and one file of plain values.

Tensors are saved under names that don't depend on the layout (:mod:`~lightning_parallel.checkpoint.keys`). All else is
in trainer.pt, and in contents.json the names of tied tensors; the first rank writes both. Each rank passes the names it
holds, and reads the names it wants. All ranks must see one file system. A crash leaves a whole checkpoint there, the
old one or the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_parallel.checkpoint import directory, keys
from lightning_parallel.checkpoint.agreement import RankSummary, agree, digests, refuse_misfits, writers
from lightning_parallel.checkpoint.directory import CONTENTS, TRAINER, PathLike, contents_of
from lightning_parallel.checkpoint.keys import MODEL, SECOND, OptimizerState
from lightning_parallel.checkpoint.plain import Wholes
from lightning_parallel.checkpoint.reading import Reader, plain_errors
from lightning_parallel.checkpoint.slices import Slices, empty_like
from lightning_parallel.ranks.collectives import Group, decided_by_first, gather_objects_on_first, guarded, together


def save(
    path: PathLike,
    *,
    model: Mapping[str, Tensor],
    optimizers: Sequence[OptimizerState],
    trainer: Mapping[str, Any],
    rank_state: Mapping[str, Tensor],
    coordinate: str,
    group: Group = None,
    order: Sequence[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    extra_state: Mapping[str, Any] = MappingProxyType({}),
    second: Mapping[str, Tensor] = MappingProxyType({}),
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
        order: the whole model's parameters in their order, for the groups' "params". By default the ranks' parameters
            follow one another.
        aliases: the other names of tied tensors, each with the name under which the tensor is in some rank's ``model``.
            The first rank's are saved.
        extra_state: what modules here have in their ``state_dict`` besides parameters and buffers, such as what
            ``get_extra_state`` returns. Of modules on several ranks the lowest rank's is saved.
        second: a second state of the model, as ``model``, if there is one.

    Raises:
        ValueError: the ranks disagree about shapes or groups.
        RuntimeError: copies of one parameter differ, or a rank could not write. What was at ``path`` is untouched.
    """
    path = Path(path)
    tensors, scalars = keys.divided([each.state for each in optimizers])
    tensors |= {MODEL + name: tensor for name, tensor in model.items()}
    tensors |= {SECOND + name: tensor for name, tensor in second.items()}
    tensors |= {keys.key_in(coordinate, name): tensor for name, tensor in rank_state.items()}
    summary = RankSummary(
        shapes={key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()},
        digests=digests(model) if dist.is_initialized() else {},
        scalars=scalars,
        param_groups=[[dict(group) for group in each.param_groups] for each in optimizers],
        extra_state=dict(extra_state),
    )
    summaries = gather_objects_on_first(summary, group)
    of_all: dict[str, Any] = {}  # on the first rank

    def begin() -> tuple[str, dict[str, int]]:
        joined, shared = agree(summaries or [], order)
        chosen = writers(summaries or [], shared)
        new = directory.begin(path)
        new.mkdir()
        of_all.update(joined)
        return str(new), chosen

    unfinished, chosen = decided_by_first(group, begin)
    new, mine = Path(unfinished), dist.get_rank(group) if dist.is_initialized() else 0
    own = {key: tensor for key, tensor in tensors.items() if chosen.get(key, mine) == mine}

    def end() -> None:
        (new / CONTENTS).write_bytes(contents_of(new, aliases, of_all["extra_state"]))
        with open(new / TRAINER, "wb") as file:
            torch.save({"trainer": dict(trainer), **of_all}, file)
        directory.replace(new, path)

    try:
        together(group, lambda: _write_tensors(new, own, group))
        decided_by_first(group, end)
    finally:
        if of_all:
            directory.delete(new)


def load(
    source: Reader | Wholes,
    saved: Mapping[str, Any],
    path: PathLike,
    model: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor | None],
    coordinate: str,
    *,
    second: Mapping[str, Tensor] | None = None,
    strict: bool = True,
) -> tuple[list[OptimizerState], dict[str, Tensor]]:
    """Read this rank's part of a checkpoint of any layout. Every rank calls it.

    Args:
        source: the tensors of a directory or of a plain checkpoint.
        saved: what trainer.pt holds, or would hold.
        path: the checkpoint's, for errors.
        model: the tensors held here, by their names in the whole model. They are filled in place and keep their dtypes.
            Those of which this rank holds a shard are :class:`~lightning_parallel.checkpoint.slices.Slices`.
        parameters: those whose optimizer state is wanted here, by name, each with a tensor of which this rank holds the
            wanted part; None for the whole state.
        coordinate: this rank's place in the layout.
        second: a second state of the model, as ``model``. All ranks want it, or none.
        strict: every tensor in ``model`` must be in the checkpoint, and every tensor there must be in the ``model`` of
            some rank. Otherwise tensors without a counterpart stay as they are.

    Returns:
        The saved optimizers, with the state of the wanted parameters and the whole model's groups; and what was saved
        at this coordinate. If the layout that saved had no such coordinate, that of another rank of the same replica;
        nothing if there was no such replica. Tensors are on the CPU.

    Raises:
        ValueError: on every rank, if some rank lacks names or finds other shapes, or the checkpoint is damaged.
    """
    wanted: dict[str, Tensor] = {}
    for prefix, state in ((MODEL, model), (SECOND, second)):
        if state is None:
            continue
        shapes = {name: source.found[key].shape for name, key in keys.below(prefix, source.found).items()}
        ranks = gather_objects_on_first({name: tensor.shape for name, tensor in state.items()}, None)
        decided_by_first(None, partial(refuse_misfits, path, ranks or (), shapes, strict=strict))
        wanted |= {prefix + name: tensor for name, tensor in state.items() if name in shapes}
    for key, found in source.found.items():
        parts = keys.parts_of(key)
        if parts is not None and parts[1] in parameters:
            like = parameters[parts[1]]  # a step has another shape
            wanted[key] = empty_like(found if like is None or like.shape != found.shape else like, found.dtype)
    of_rank = keys.nearest(coordinate, source.found)
    wanted |= {key: empty_like(source.found[key], source.found[key].dtype) for key in of_rank.values()}
    together(None, lambda: source.check(wanted))
    together(None, lambda: source.fill(wanted))
    tensors = {key: value.local if isinstance(value, Slices) else value for key, value in wanted.items()}
    scalars = [{name: each[name] for name in parameters if name in each} for each in saved["optimizer_scalars"]]
    states = keys.joined(tensors, scalars)
    optimizers = [OptimizerState(*pair) for pair in zip(states, saved["param_groups"], strict=True)]
    return optimizers, {name: wanted[key] for name, key in of_rank.items()}


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
