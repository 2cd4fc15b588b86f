"""Where a layout cuts a module: by parameters, or by time where that is faster; or why the module doesn't allow it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_parallel.checks.late_gradients import refuse_hooks, refuse_ties
from lightning_parallel.checks.manual import SEVERAL_OPTIMIZERS, refuse_manual_optimization
from lightning_parallel.costs.profile import Profile
from lightning_parallel.cuts.balance import balanced
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from lightning_parallel.planning.layouts import Balance, Choice
from lightning_parallel.set_up.stages import refuse_training
from lightning_parallel.steps.between_batches import reasons_to_wait
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.repeated import refuse_unrepeatable
from lightning_parallel.tracing.trace import Call, Trace

_WORTH = 1.03  # the slowest chunk has to be so much slower, for cuts to be moved by time


class _Everything(Container[Call]):
    def __contains__(self, call: object) -> bool:
        return True


class Cuts:
    """Cuts a module for layouts, and remembers where.

    Args:
        step: on the smallest microbatch.
        divisible: can a batch be split into microbatches?
    """

    def __init__(
        self, module: pl.LightningModule, trainer: pl.Trainer, step: Callable[[], Any], *, divisible: bool
    ) -> None:
        self._module, self._trainer, self._step, self._divisible = module, trainer, step, divisible
        self._traces: dict[Any, Trace] = {}  # by the units, and how they were traced
        self._cuts: dict[Any, Partition | ValueError] = {}
        self._moved: dict[Any, Balance | None] = {}  # where cuts are moved
        self._unrepeatable: dict[Any, ValueError | None] = {}  # by the layers, why they can't run again

    @property
    def layers(self) -> int:
        """The number of calls of layers, as long as none is cut into its parts; 1 if it isn't known."""
        try:
            return len(self.cut(Choice("single")).layers)
        except ValueError:  # each layout is refused with it
            return 1

    def best(self, choice: Choice, profile: Profile, samples: int) -> tuple[Choice, Partition]:
        """A layout and its parts. Each has as many parameters, unless the slowest stage gets faster by other cuts.

        Args:
            profile: the times of calls.
            samples: of a microbatch.

        Raises:
            ValueError: the module doesn't allow the layout.
        """
        if choice.is_pipeline:
            refuse_manual_optimization(self._module)
            refuse_training(self._module)
            if len(self._trainer.strategy.optimizers) > 1:
                raise ValueError(SEVERAL_OPTIMIZERS)
            if not self._divisible and choice.microbatches > 1:
                raise ValueError("The batch can't be split into microbatches.")
        if choice.is_late:
            refuse_hooks(self._trainer, self._module)
        parts = self.cut(choice)
        if choice.is_late:
            refuse_ties(self._module, parts)
        if choice.stages == 1:
            return choice, parts
        key = choice.placement, choice.is_late
        if key not in self._moved:
            self._moved[key] = self._fastest(choice, parts, profile, samples)
        choice = replace(choice, balance=self._moved[key])
        return choice, self.cut(choice)

    def cut(self, choice: Choice) -> Partition:
        """The parts of a layout, which may say where it is cut. ValueError: there are none."""
        key = choice.placement, choice.balance, choice.is_late
        if key not in self._cuts:
            balance = "parameters" if choice.balance is None else choice.balance
            try:
                self._cuts[key] = partition(
                    self._module,
                    self._step,
                    choice.stages,
                    None,
                    balance,
                    placement=choice.placement,
                    keep_together=choice.is_late,
                    traced=self._traced,
                )
            except ValueError as error:
                self._cuts[key] = error
            except Exception as error:  # any: of the user's step
                self._cuts[key] = ValueError(f"The step can't be traced: {type(error).__name__}: {error}")
        found = self._cuts[key]
        if isinstance(found, ValueError):
            raise found
        if choice.recompute:
            self._refuse_unrepeatable(found)
        return found

    def _refuse_unrepeatable(self, parts: Partition) -> None:
        if parts.layers not in self._unrepeatable:
            units = {id(self._module.get_submodule(name)): name for name in parts.units}
            error = None
            try:
                refuse_unrepeatable(self._module, parts.layers, partial(trace, self._module, units, self._step))
            except ValueError as found:
                error = found
            self._unrepeatable[parts.layers] = error
        if (known := self._unrepeatable[parts.layers]) is not None:
            raise known

    def _traced(
        self,
        module: nn.Module,
        units: Mapping[int, str],
        step: Callable[[], Any],
        *,
        exits: Container[Call] = (),
        logged: object = None,
        hooks: object = None,
        **options: Any,
    ) -> Trace:
        """As :func:`.trace`, each dry run once: cuts of the same units are found by the same ones. Nothing is kept of
        what a planned step logs, and no hooks run."""
        key = frozenset(units.values()), str(sorted(options.items()))
        if key not in self._traces:
            self._traces[key] = trace(module, units, step, exits=_Everything(), **options)
        seen = self._traces[key]
        return replace(seen, stored_after={call for call in seen.stored_after if call is None or call in exits})

    def _fastest(self, choice: Choice, parts: Partition, profile: Profile, samples: int) -> Balance | None:
        """How to cut so that the slowest stage is fastest; None for the cuts that there are."""
        best, least = None, max(_of_stages(profile, parts, samples))
        tried: dict[Balance, None] = {}
        chains = [parts]
        with suppress(ValueError):  # a chain of other layers, if some are cut into their parts for their parameters
            if parts.layers != (other := self.cut(replace(choice, balance="operations"))).layers:
                chains.append(other)
                tried["operations"] = None
        for chain in chains:
            seconds = profile.seconds(chain, samples)
            bounds = balanced([round(1e9 * each) for each in seconds], chain.chunks, [True] * len(seconds))
            tried[tuple(b - a for a, b in pairwise(bounds))] = None
        for balance in tried:
            with suppress(ValueError):  # no cut may be there
                slowest = max(_of_stages(profile, self.cut(replace(choice, balance=balance)), samples))
                if least > _WORTH * slowest:
                    best, least = balance, slowest
        return best

    def waits(self, parts: Partition) -> bool:
        """Does something make stages wait for each other between two batches?"""
        shared = [name for name in parts.shared() if self._module.get_parameter(name).requires_grad]
        plugin = self._trainer.precision_plugin
        return any(True for _ in reasons_to_wait(self._trainer, self._module, plugin, shared, validates=False))


def _of_stages(profile: Profile, parts: Partition, samples: int) -> list[float]:
    """Of each stage, for a microbatch."""
    sums = [0.0] * parts.stages
    for chunk, cost in zip(parts.placement, profile.chunks(parts, samples), strict=True):
        sums[chunk] += cost.forward + cost.backward
    return sums
