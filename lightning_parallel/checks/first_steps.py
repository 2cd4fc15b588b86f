"""Compares what a tensor group's ranks return, log and keep in the first step of each kind, and in some later ones.

They compute one model together, so all of them must come to the same. A difference has causes that no later check
finds: a parameter read outside of its layer (each rank sees its own shard), or random numbers that the step draws
differently. The first step is compared before its backward, so nothing has been updated. Ranks may part later, in
another epoch or in every third batch: so steps 1, 2, 3, 5, 8, 13, ... are compared, fewer and fewer. In a pipeline
these are runs of the step for microbatches and chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.checks.reads_of_shards import ReadsOfShards, warn_of_sizes
from lightning_parallel.private.torch.tensors import tensors_in
from lightning_parallel.ranks.collectives import gather_objects
from lightning_parallel.results.logs import logging_through
from lightning_parallel.values import first_few, scalars

T = TypeVar("T")

_ROUNDING = 1e3  # units of the last place by which kernels that add in any order may differ
_CAUSES = (
    "Either the step reads a divided parameter outside of its layer, so that each rank sees its own shard (a norm, a "
    "penalty, F.linear(x, layer.weight)), or returns what a divided layer has computed: do this in the optimizer "
    "(weight_decay), or leave the layer out of the plan. "
    "Or it draws random numbers of its own on each rank: draw them with torch's default generator."
)


class _Seen(NamedTuple):
    """What one rank has found in a step."""

    returned: dict[str, float]  # numbers; ranks that differ in them end the run
    beside: dict[str, float]  # what was logged, and norms of other tensors returned or kept; a difference is warned of
    reads: dict[str, str]  # by divided parameter, the function that read it outside of its layer


class FirstSteps:
    """Compares the ranks of a tensor ``group`` in steps of each kind. ``names`` are those of the module's divided
    parameters."""

    def __init__(self, module: nn.Module, names: list[str], group: dist.ProcessGroup) -> None:
        self._module, self._names, self._group = module, names, group
        self._steps: Counter[str] = Counter()  # so far, by kind
        self._due: dict[str, tuple[int, int]] = {}  # by kind, the next two that are compared
        self._warned: set[str] = set()  # of these names

    def run(self, kind: str, step: Callable[[], T]) -> T:
        """Run a step of a kind (its name). Some are compared between ranks: a collective.

        Raises:
            RuntimeError: on all ranks of the group, if they come to different losses.
        """
        self._steps[kind] += 1
        due, then = self._due.get(kind, (1, 2))
        if self._steps[kind] < due:
            return step()
        self._due[kind] = then, due + then
        logged: dict[str, Any] = {}
        module, reads = self._module, ReadsOfShards(self._module, self._names)
        assert isinstance(module, pl.LightningModule)
        log, before = module.log, _attributes(module)  # held: a new tensor must not get the id of one that is gone

        def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            logged[name] = value
            log(name, value, *args, **kwargs)

        with logging_through(module, note), reads:
            output = step()
        warn_of_sizes(reads.sizes - self._warned, kind)
        self._warned |= reads.sizes
        returned = output if isinstance(output, Mapping) else {"loss": output}
        known, predicts = set(map(id, before.values())), kind == "predict_step"
        kept = {name: tensor for name, tensor in _attributes(module).items() if id(tensor) not in known}
        norms = {name: _norm(tensor) for name, tensor in (kept | _metric_states(module)).items()}
        returns = ((i, tensor) for i, tensor in enumerate(tensors_in(output)) if _has_norm(tensor))
        outputs = {f"output {i}": _norm(tensor) for i, tensor in returns if predicts or tensor.numel() > 1}
        own = _Seen(scalars(returned) | (outputs if predicts else {}), scalars(logged) | norms | outputs, reads.found)
        loss = returned.get("loss")
        dtype = loss.dtype if isinstance(loss, Tensor) and loss.is_floating_point() else torch.get_default_dtype()
        tolerance = min(1e-2, _ROUNDING * torch.finfo(dtype).eps)  # relative
        _compare(kind, gather_objects(own, self._group), tolerance)
        return output


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """The tensors in a module's own attributes, by name."""
    return {
        f"self.{name} ({i})" if i else f"self.{name}": tensor
        for name, value in vars(module).items()
        if not name.startswith("_")
        for i, tensor in enumerate(tensors_in(value))
        if _has_norm(tensor)
    }


def _metric_states(module: nn.Module) -> dict[str, Tensor]:
    """The states of a module's metrics, by name; of a state that is a list the last item, which the step has added."""
    states = {
        f"self.{path}.{name}": state[-1] if isinstance(state, list) and state else state
        for path, part in module.named_modules()
        if isinstance(part, Metric)
        for name, state in part.metric_state.items()
    }
    return {name: state for name, state in states.items() if isinstance(state, Tensor) and _has_norm(state)}


def _has_norm(x: Tensor) -> bool:
    """Is it a plain tensor with values? Absent ones have none, and of sparse and nested ones torch takes no norm."""
    return type(x) is Tensor and x.layout is torch.strided and not x.is_meta and not x.is_nested


def _norm(x: Tensor) -> float:
    is_wide = x.is_complex() or (x.is_floating_point() and x.element_size() > 1)  # float8 can't be promoted
    x = x.detach() if is_wide else x.detach().double()
    return float(torch.linalg.vector_norm(x, dtype=torch.complex128 if x.is_complex() else torch.float64))


def _compare(kind: str, ranks: list[_Seen], tolerance: float) -> None:
    for rank, seen in enumerate(ranks):
        for name, function in seen.reads.items():
            others = f" (and {len(seen.reads) - 1} other parameters)" if len(seen.reads) > 1 else ""
            raise RuntimeError(
                f"{kind} reads '{name}'{others} outside of its layer, in {function}, but the plan divides it: tensor "
                f"rank {rank} of {len(ranks)} would compute with its own shard, not with the parameter. Do this in the "
                f"optimizer (weight_decay for an L2 penalty), or leave the layer out of the plan."
            )
    if apart := _first_difference([seen.returned for seen in ranks], tolerance):
        raise RuntimeError(f"The ranks of one tensor group come to different values in {kind}: {apart}. {_CAUSES}")
    if apart := _first_difference([seen.beside for seen in ranks], tolerance):
        rank_zero_warn(
            f"The ranks of one tensor group log, return or keep different values in {kind}: {apart}. The log shows the "
            f"first rank's. A value computed from a divided layer's parameters or outputs is that of a shard: leave "
            f"the layer out of the plan."
        )


def _first_difference(ranks: list[dict[str, float]], tolerance: float) -> str | None:
    first = ranks[0]
    for rank, values in enumerate(ranks[1:], start=1):
        apart = [n for n in {**first, **values} if not _are_close(first.get(n), values.get(n), tolerance)]
        if apart:
            a, b = (f"{x[apart[0]]:.9g}" if apart[0] in x else None for x in (first, values))
            others = f"; others that differ: {first_few(map(repr, apart[1:]))}" if apart[1:] else ""
            return f"{apart[0]!r} is {a} on tensor rank 0, and {b} on rank {rank}{others}"
    return None


def _are_close(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))
