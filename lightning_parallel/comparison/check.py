"""Has a layout the numbers of one process, on this module? ``lightning_parallel.check`` trains a few steps of both.

::

    one process     the batches whole                  compared with
    the layout      shares and microbatches of them    compared, if they differ, with
    one process     the same shares and microbatches

What computes with several samples (BatchNorm, a loss that compares them) differs by nature where a batch is divided:
then the layout equals one process that divides it alike, and nothing is wrong with the layout.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn

from lightning_parallel.batch import batch_size
from lightning_parallel.comparison.beginning import Beginning, where
from lightning_parallel.comparison.differences import BUFFER, LOGGED, LOSS, WEIGHT, Difference, differences
from lightning_parallel.comparison.evidence import Evidence, Witness
from lightning_parallel.comparison.rounding import Limits, last_bits_changed
from lightning_parallel.comparison.runs import Shares, first_batches, fit, train_in_one_process, trainer_of
from lightning_parallel.comparison.units import Notes, UnitWatch
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.staged import StagedStrategy

_TRIALS = 3  # in which rounding is changed, in other precisions than float64
_SHOWN = 5
_DROPOUT = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout


@dataclass(frozen=True)
class Comparison:
    """How a layout's training compares with that of one process.

    Attributes:
        layout: what was compared.
        updates: how many.
        largest: the largest difference; None if nothing could be compared.
        different: what differs by more than rounding, what is computed first coming first.
        by_nature: is all of it the same as in one process that divides batches alike?
        beginning: where the first difference begins, as a second run of both has shown. None if it hasn't come again,
            or is in nothing that a module returns or holds.
        without_dropout: were rates of dropout set to 0? They are where a layer's batch or weights are divided among
            ranks: masks of shares and of shards are others than one process's by nature.
    """

    layout: str
    updates: int
    largest: Difference | None
    different: tuple[Difference, ...] = ()
    by_nature: bool = False
    beginning: Beginning | None = None
    without_dropout: bool = False

    @property
    def equal(self) -> bool:
        """Are all numbers those of one process, up to rounding?"""
        return self.largest is not None and not self.different

    def __str__(self) -> str:
        if self.largest is None:
            return f"{self.layout}: nothing was compared, since no update was made."
        found = f"{self.largest.size:.1e}, {self.largest.name} in update {self.largest.update}"
        off = "\nDropout was off: its masks are others where ranks divide batches or layers." * self.without_dropout
        if self.equal:
            return f"{self.layout}: equal to one process. {self.updates} updates, largest difference {found}.{off}"
        what = "\n".join(f"    update {d.update}: {d.name}, {d.size:.1e}" for d in self.different[:_SHOWN])
        more = f"\n    and {len(self.different) - _SHOWN} more" if len(self.different) > _SHOWN else ""
        why = "DIFFERENT from one process."
        if self.by_nature:
            why = (
                "different by nature.\nOne process that divides each batch alike has the same numbers. It may be "
                "BatchNorm, a loss that compares\nsamples, replicas' means over unequal numbers of tokens, or dropout."
            )
        begins = "" if self.beginning is None else f"\nIt begins in {self.beginning}"
        return f"{self.layout}: {why} First:\n{what}{more}{begins}{off}"


def check(
    module: pl.LightningModule,
    data: pl.LightningDataModule | Iterable[Any] | None = None,
    *,
    strategy: str | LayoutStrategy = "pipeline_1f1b",
    devices: int = 2,
    num_nodes: int = 1,
    batches: int = 3,
    precision: str = "64-true",
    accelerator: str = "auto",
    **options: Any,
) -> Comparison | None:
    """Train a few batches in one process and under a layout, and compare losses, gradients, weights, buffers and logs.

    All ranks begin with the first one's weights.

    To be called in a script of its own, under ``if __name__ == "__main__":``, since Lightning starts the other ranks by
    running the script again, unless torchrun or a cluster has started them. The first process holds the whole model. It
    returns the comparison; on other ranks None.

    Args:
        module: what to train. Copies of it are.
        data: a LightningDataModule or a loader; by default the module's own loader. Its first batches are the batches
            of the whole layout; replicas get shares of them.
        strategy: a strategy of this package, or its name.
        devices: the number of ranks on each node.
        num_nodes: as the Trainer's.
        batches: how many to train.
        precision: of all runs, as the Trainer's. In others than "64-true", three more runs of one process, with changed
            last bits, tell how far rounding moves each number; four times as far is the tolerance.
        accelerator: as the Trainer's.
        **options: of the constructor of a strategy that is given by its name. Here ``microbatches="auto"`` means two
            for each device, if the batch has so many samples.

    Raises:
        ValueError: the strategy isn't one of this package, or has a precision of its own; ``batches`` is less than 1,
            or ``data`` has none; a loss isn't a number. What a run raises, such as a refusal, is raised.
    """
    if batches < 1:
        raise ValueError(f"batches={batches}: give a number of at least 1.")
    ranks = devices * num_nodes
    _refuse_other_ranks(ranks)
    common: Mapping[str, Any] = {"accelerator": accelerator, "precision": precision, "limit_val_batches": batches}
    values = first_batches(module, data, batches, common)
    size = batch_size(values[0])

    def under_layout(*watches: Callback) -> tuple[LayoutStrategy, pl.Trainer, Shares]:
        layout, shares = layout_of(strategy, options, min(size, 2 * ranks)), Shares(values)
        trainer = trainer_of(shares, *watches, strategy=layout, devices=devices, num_nodes=num_nodes, **common)
        return layout, trainer, shares

    witness = Witness()
    layout, trainer, shares = under_layout(witness)
    replicas = layout.layout.size("data")
    module = copy.deepcopy(module)
    without_dropout = max(replicas, layout.layout.size("tensor")) > 1 and _without_dropout(module)
    in_one_process = partial(train_in_one_process, module, data, common)
    expected = _expected(partial(in_one_process, values), precision) if layout.layout.rank == 0 else None
    found: list[Difference] = []
    different: list[Difference] = []

    def batch_of_first() -> int | None:
        if expected is None:
            return None
        plain, limits = expected
        found.extend(differences(witness.of_all_ranks, plain))
        different.extend(each for each in found if not each.size <= limits.of(each))
        first = next((each for each in different if each.order <= WEIGHT), None)
        if first is None:
            return None
        # A loss has its batch's number.
        return plain.batches[first.update] if first.order != LOSS and plain.batches else first.update

    batch = fit(trainer, module, data, shares, batch_of_first)
    units = UnitWatch(batch)
    if batch is not None:  # on all ranks
        _, again, shares = under_layout(Witness(), units)  # the same run, so with another witness
        fit(again, module, data, shares)
    os.environ.setdefault("WORLD_SIZE", str(ranks))  # Lightning deletes it
    if expected is None:
        return None
    plain, limits = expected
    if (unknown := next((k for k, loss in enumerate(plain.losses) if not math.isfinite(loss)), None)) is not None:
        raise ValueError(
            f"In one process the loss of batch {unknown} is {plain.losses[unknown]}, so what comes of it can't be "
            f"compared. Give other data or weights."
        )
    by_nature, beginning = False, None
    microbatches = getattr(layout.options, "microbatches", 1)
    if isinstance(layout, StagedStrategy) and microbatches == "auto":
        microbatches = layout.automatic_microbatches(size // replicas)
    parts = replicas * microbatches
    if different and (parts == 1 or (parts <= size and module.automatic_optimization)):  # else a pipeline refuses it
        by_nature, alike, alone = _divided_alike(
            partial(in_one_process, values), replicas, microbatches, batch, witness, different, limits
        )
        if batch is not None and not by_nature:
            first = different[0]
            beginning = where(witness.of_all_ranks, alike, units.of_all_ranks, alone, first.update, limits.of(first))
    largest = max(found, key=lambda each: each.size, default=None)
    name = f"{_name(strategy)} on {ranks} devices"
    return Comparison(name, len(plain.gradients), largest, tuple(different), by_nature, beginning, without_dropout)


def _divided_alike(
    in_one_process: Callable[..., Evidence],
    replicas: int,
    microbatches: int,
    batch: int | None,
    witness: Witness,
    different: Iterable[Difference],
    limits: Limits,
) -> tuple[bool, Evidence, Notes]:
    """Does one process that divides batches as the layout does come to the same? And what does it come to, and what
    do its units in ``batch``?

    There are two such processes. One runs all parts as microbatches of one batch. Replicas average their own means, so
    to the other each share is a batch; but then hooks of batches run, and logs are, once for each.
    """
    parts = replicas * microbatches
    for shares, inside in dict.fromkeys([(1, parts), (replicas, microbatches)]):
        units = UnitWatch(batch, shares)
        strategy = PipelineStrategy(microbatches=inside) if inside > 1 else "auto"
        alike = in_one_process(strategy, units, replicas=shares)
        # A replica's buffers come of its share only.
        ignored = {BUFFER: replicas > 1, LOGGED: shares > 1}
        left = [each for each in differences(witness.of_all_ranks, alike) if not ignored.get(each.order)]
        same = all(each.size <= limits.of(each) for each in left)
        if parts > 1 and same and (shares == 1 or any(each.order != LOGGED for each in different)):
            return True, alike, units.of_all_ranks[0]
    return False, alike, units.of_all_ranks[0]


def _refuse_other_ranks(ranks: int) -> None:
    """Another number of ranks than this script has would wait for each other for ever."""
    started = int(os.environ.get("WORLD_SIZE", ranks)) if "LOCAL_RANK" in os.environ else ranks
    if started != ranks:
        raise ValueError(
            f"check is to run on {ranks} ranks (devices= times num_nodes=), but this script runs on {started} already. "
            f"Check each number of ranks in a script of its own."
        )


def _expected(in_one_process: Callable[[], Evidence], precision: str) -> tuple[Evidence, Limits]:
    """What one process comes to, and how far other numbers may be from it."""
    plain, trials = in_one_process(), []
    for trial in range(0 if precision == "64-true" else _TRIALS):
        with last_bits_changed(trial):
            trials.append(in_one_process())
    return plain, Limits(plain, trials, precision)


def _without_dropout(module: pl.LightningModule) -> bool:
    """Set the rates of layers that drop to 0. Returns whether there are any."""
    found = [
        (part, name)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and value and (name == "p" if isinstance(part, _DROPOUT) else "dropout" in name)
    ]
    for part, name in found:
        setattr(part, name, 0.0)
    return bool(found)


def layout_of(strategy: str | LayoutStrategy, options: dict[str, Any], microbatches: int) -> LayoutStrategy:
    """A copy of a strategy, or one by its name. ``microbatches`` are those of a pipeline that is given by its name, and
    without them."""
    if isinstance(strategy, LayoutStrategy):
        if options:
            raise ValueError(f"{', '.join(options)}: give options to the strategy, since it is made already.")
        if type(strategy.precision_plugin) is not Precision:
            raise ValueError("The strategy has a precision of its own. Give check precision=, which is for all runs.")
        return copy.deepcopy(strategy)
    name = _name(strategy)
    kind = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else None
    if kind is None or not issubclass(kind, LayoutStrategy):
        known = sorted(
            each for each, entry in StrategyRegistry.items() if issubclass(entry["strategy"], LayoutStrategy)
        )
        raise ValueError(f"strategy={name!r} is none of this package's, so check can't compare it: {', '.join(known)}.")
    options = StrategyRegistry[name]["init_params"] | options
    chooses = "pipeline" in name and options.get("schedule") != "naive"
    if chooses and options.get("microbatches", "auto") == "auto":
        options["microbatches"] = microbatches
    layout: LayoutStrategy = kind(**options)
    return layout


def _name(strategy: str | Strategy) -> str:
    return strategy if isinstance(strategy, str) else type(strategy).__name__
