"""A plan for a model that brings none: pairs of linear layers (``pairs.py``), each tried before it is used.

How to divide a pair (fused projections part by part? which of the attention's integers count heads?) is tried out. The
columns get random weights, and their module is run whole, then with each rank's shards in their place. What reaches the
row layer on a rank must be that rank's piece of what reaches it in the whole run. What the module returns must be the
same, given the same output of the row layer: attention that returns its probabilities, or has a bias for each head,
can't be divided. Nothing is sent for this, and the model is left as it was. A pair for which no way is found stays
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lightning_parallel.batch import cloned
from lightning_parallel.private.torch.tensors import tensors_in, tree_map
from lightning_parallel.ranks.shard import Shard, piece
from lightning_parallel.seeding import Generators
from lightning_parallel.tensor.linear import is_divisible, is_linear
from lightning_parallel.tensor_plans.pairs import Pair, find_pairs
from lightning_parallel.tensor_plans.rules import pattern_of
from lightning_parallel.tensor_plans.style import Style
from lightning_parallel.tensor_plans.styles import HEAD_COUNTS
from lightning_parallel.tracing.snapshot import StateKept
from lightning_parallel.values import changed

_HUGE = 1e3  # masks hold larger values
_ATTEMPTS = 40  # ways to divide one pair that are tried

# One run of a block: what reached its row layer, what that answered, and the tensors that the block returned.
_Run = list[Tensor]


@dataclass(frozen=True)
class _Way:
    """A way to divide a pair: the number of equal fused parts in each column layer, and the integers that are divided,
    each with the name of its module inside the block."""

    parts: int
    attributes: tuple[tuple[str, str], ...]


def found_plan(module: nn.Module, run: Callable[[], Any], count: int) -> dict[str, str | Style]:
    """Rules for all pairs that can be divided over ``count`` ranks, by full names. ``run`` runs the whole model on any
    input, without side effects that matter."""
    plan: dict[str, str | Style] = {}
    known: dict[str, _Way | None] = {}  # by what blocks have in common
    # Generators of all GPUs, and of the host.
    with torch.random.fork_rng(), Generators(torch.device("cpu")).kept(), StateKept(module):
        module.eval()
        pairs = [
            pair
            for pair in find_pairs(module, run)
            if all(is_divisible(module.get_submodule(name)) for name in (*pair.columns, pair.row))
        ]
        for pair in pairs:
            block = _Block(module, pair, count)
            way = known.get(block.kind)
            if way is None or not block.allows(way):
                way = known[block.kind] = next((way for way in block.ways() if block.allows(way)), None)
            if way is not None:
                plan |= block.rules(way)
    return plan


def table_of(module: nn.Module, plan: dict[str, str | Style]) -> str:
    """The rules of a found plan as lines, those of equal blocks once. Then come the linear layers that stay whole."""
    lines = [f"    {pattern_of(module, name)}: {style}" for name, style in plan.items()]
    linear = [name for name, layer in module.named_modules() if is_linear(layer)]
    whole = dict.fromkeys(pattern_of(module, name) for name in linear if name not in plan)
    return "\n".join([*dict.fromkeys(lines), *(f"    {name}: whole" for name in whole)])


# -- ways to divide one, by trying -------------------------------------------------------------------------------

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class _Block:
    """A pair inside the smallest called module that holds it."""

    def __init__(self, root: nn.Module, pair: Pair, count: int) -> None:
        self._root, self._pair, self._count = root, pair, count
        self._name = pair.around
        self._around, self._row = root.get_submodule(self._name), root.get_submodule(pair.row)
        generator = torch.Generator().manual_seed(0)
        self._call = tree_map(lambda x: _noisy(x, generator), pair.call)
        self._weights = {name: self._drawn(name, generator) for name in pair.columns}
        inside = [name.removeprefix(self._name) for name in (*pair.columns, pair.row)]
        shapes = [tuple(weight.shape) for weight, _ in self._weights.values()]
        self.kind = f"{type(self._around).__name__} {inside} {shapes}"  # what equal blocks of a model have in common
        self._whole, self._whole_in_training = self._repeatable(training=False), self._repeatable(training=True)

    def ways(self) -> Iterator[_Way]:
        """The ways to divide the pair, the likely ones first."""
        width = None if self._whole is None else self._whole[0].shape[-1]
        parents = dict.fromkeys((*(name.rpartition(".")[0] for name in self._pair.columns), self._name))
        parents = dict.fromkeys(parent.removeprefix(self._name).lstrip(".") for parent in parents)
        integers = [
            (parent, name, value)
            for parent in parents
            for name, value in vars(self._around.get_submodule(parent)).items()
            if type(value) is int and value > 1 and value % self._count == 0
        ]
        heads = tuple((parent, name) for parent, name, _ in integers if name in HEAD_COUNTS)
        # Those that may count heads under another name, or be the width of all heads.
        sizes = [(p, name) for p, name, value in integers if width and width % value == 0 and (p, name) not in heads]
        outputs = self._weights[self._pair.columns[0]][0].shape[0]
        fused = [parts for parts in ((1, 3, 2) if len(self._pair.columns) == 1 else (1,)) if outputs % parts == 0]
        subsets = (chosen for number in range(len(sizes) + 1) for chosen in combinations(sizes, number))
        ways = (_Way(parts, (*heads, *chosen)) for chosen in subsets for parts in fused)
        yield from islice(ways, _ATTEMPTS)

    def allows(self, way: _Way) -> bool:
        """Does each rank's row layer get that rank's piece of what the whole one gets, and is the rest of the run
        equal? In evaluation, and if it can be seen there, in training, where a layer may quantise, for example."""
        if self._whole is None or not self._divides(way, self._whole, training=False):
            return False
        return self._whole_in_training is None or self._divides(way, self._whole_in_training, training=True)

    def _divides(self, way: _Way, whole: _Run, training: bool) -> bool:
        reached, answer, *returned = whole
        for rank in range(self._count):
            columns: dict[str, tuple[Tensor, Tensor | None]] = {}
            for name, (weight, bias) in self._weights.items():
                size = weight.shape[0] // way.parts
                if piece(size, self._count - 1, self._count)[0] >= size or weight.shape[0] % way.parts:
                    return False  # nothing would be left for the last rank
                cut = Shard((weight.shape[0],), 0, (size,) * way.parts, rank, self._count)
                columns[name] = cut.take(weight), None if bias is None else cut.take(bias)
            mine = self._run(columns, way.attributes, answer, training)
            start, stop = piece(reached.shape[-1], rank, self._count)
            if mine is None or not _alike(mine, [reached[..., start:stop], answer, *returned]):
                return False
        return bool(reached.norm() > 0)

    def _repeatable(self, training: bool) -> _Run | None:
        """A run of the whole block; None if it fails, or if two of them differ, since random numbers are drawn."""
        first, second = (self._run(self._weights, (), None, training) for _ in range(2))
        return first if first is not None and second is not None and _alike(first, second) else None

    def rules(self, way: _Way) -> dict[str, str | Style]:
        column = f"column:{way.parts}" if way.parts > 1 else "column"
        rules: dict[str, str | Style] = dict.fromkeys(self._pair.columns, column)
        rules[self._pair.row] = "row"
        for parent in dict.fromkeys(parent for parent, _ in way.attributes):
            whole = ".".join(part for part in (self._name, parent) if part)
            rules[whole] = f"divide:{','.join(name for owner, name in way.attributes if owner == parent)}"
        return rules

    def _drawn(self, name: str, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Random weights ``[out, in]``: with equal ones, or zeros, any way would seem to fit."""
        layer: Any = self._root.get_submodule(name)
        shape = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        options = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        bias = None if layer.bias is None else torch.randn(shape[0], generator=generator).to(**options)
        return weight.to(**options), bias

    def _run(
        self,
        columns: Mapping[str, tuple[Tensor, Tensor | None]],
        divided: Iterable[tuple[str, str]],
        answer: Tensor | None,
        training: bool,
    ) -> _Run | None:
        """Run the block with other weights of its column layers, with divided integers, and with a row layer that
        returns ``answer``, or its own output if that is None. In training, dropout layers stay out of it. Returns None
        if the block fails, or calls its row layer more than once."""
        calls: list[tuple[Tensor, Tensor]] = []
        own = self._row.forward

        def row(x: Tensor) -> Tensor:
            result: Tensor = own(x) if answer is None else answer.clone()
            calls.append((x.clone(), result.clone()))
            return result

        changes: list[tuple[dict[str, Any], str, Any]] = [(vars(self._row), "forward", row)]
        for name, (weight, bias) in columns.items():
            layer = vars(self._root.get_submodule(name))
            changes.append((layer, "forward", partial(F.linear, weight=weight, bias=bias)))
        for owner, name in divided:
            module = self._around.get_submodule(owner)
            changes.append((vars(module), name, getattr(module, name) // self._count))
        parts = [*self._around.modules()] if training else []
        modes = [(vars(part), "training", not isinstance(part, _DROPOUT)) for part in parts]
        # In a mode, torch's own transformer layers call their linear layers in evaluation too.
        with changed([*changes, *modes]), torch.no_grad(), BaseTorchFunctionMode():
            try:
                args, kwargs = cloned(self._call)
                output = self._around(*args, **kwargs)
            except Exception:  # any: of shapes that don't fit, in code that isn't ours
                return None
        return [*calls[0], *tensors_in(output)] if len(calls) == 1 else None


def _noisy(x: Any, generator: torch.Generator) -> Any:
    """An activation with noise: if all positions held the same, attention would fit any number of heads."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel() or not bool(x.abs().max() < _HUGE):
        return x
    return x + torch.randn(x.shape, generator=generator).to(x)


def _alike(mine: _Run, theirs: _Run) -> bool:
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    """Are two tensors equal up to rounding?"""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not theirs.is_floating_point():
        return mine.equal(theirs)
    size, apart = theirs.double().norm(), (mine.double() - theirs.double()).norm()
    tolerance = 1e-3 if torch.finfo(theirs.dtype).bits > 16 else 5e-2
    return bool(apart <= tolerance * size)
