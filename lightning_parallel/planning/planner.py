"""``lightning_parallel.plan``: which layout for this module, these devices and this memory, and what it will cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.batch import batch_size, cloned, split
from lightning_parallel.checks.late_gradients import refuse_hooks, refuse_ties
from lightning_parallel.checks.manual import SEVERAL_OPTIMIZERS, refuse_manual_optimization
from lightning_parallel.comparison.runs import first_batches, trainer_of
from lightning_parallel.cuts.balance import balanced
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from lightning_parallel.disk_offload import DiskOffload
from lightning_parallel.loading.first_batch import as_in
from lightning_parallel.planning.devices import Device, described, here
from lightning_parallel.planning.layouts import Choice, choices, with_checkpointing
from lightning_parallel.planning.memory import State, on_each_stage
from lightning_parallel.planning.profile import Profile
from lightning_parallel.planning.step_time import of_step
from lightning_parallel.planning.table import MARGIN, Plan, Row
from lightning_parallel.private.torch import tree_leaves
from lightning_parallel.results.logs import discard, logging_through
from lightning_parallel.set_up.stages import refuse_training
from lightning_parallel.settings import ByteSize, bytes_of
from lightning_parallel.steps.between_batches import gained, reasons_to_wait
from lightning_parallel.values import first_few

_WORTH = 1.03  # the slowest chunk has to be so much slower, for cuts to be moved by time


def plan(
    module: pl.LightningModule,
    data: Any,
    *,
    devices: int = 2,
    memory: str | None = None,
    device: str = "here",
    precision: str = "32-true",
    **trainer: Any,
) -> Plan:
    """The layouts of a module over some devices, ranked by the time of a step, with the memory that each needs.

    ::

        print(lightning_parallel.plan(MyModule(), next(iter(loader)), devices=4, memory="2GiB"))

    Nothing is trained, and the module stays as it is. A copy of it runs its step on tensors without values; one layer
    of each kind runs on this machine. It takes seconds.

    What it doesn't know: other GPUs than those it tries layers on but by their data sheets, contention of links, the
    memory of CUDA and of the process itself, and that layouts with more than one axis besides data exist
    (``pipeline_tensor``, fully sharded pipelines).

    Args:
        module: what is to be trained.
        data: a batch of all replicas together; or a LightningDataModule or a DataLoader, whose first one is taken.
        devices: their number.
        memory: of each, such as ``"24GiB"``. None: no limit.
        device: ``"here"``: layers are timed on this machine's GPU or CPU. ``"a100"``, ``"h100"``, ``"h200"``, ``"l4"``:
            times are those of the data sheet, at half of the peak.
        precision: as the Trainer's.
        **trainer: other arguments of the Trainer, such as ``gradient_clip_val``, for which stages wait.

    Raises:
        ValueError: a value that its setting doesn't take. That nothing fits is said by :attr:`.Plan.best`.
    """
    if devices < 1:
        raise ValueError(f"devices={devices}: give 1 or more.")
    if memory is not None and memory not in ByteSize():
        raise ValueError(f"memory={memory!r}: give a size, {ByteSize()}.")
    limit = None if memory is None else bytes_of(memory)
    tried_on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    halves = precision.startswith(("bf16", "16"))
    rates = here(tried_on, torch.float32) if device == "here" else described(device, halves=halves)
    batch = data
    if isinstance(data, pl.LightningDataModule | DataLoader):
        (batch,) = first_batches(module, data, 1, {"accelerator": "cpu"})
    made = trainer_of(devices=1, accelerator="cpu", precision=precision, **trainer)
    with _ready(module, made) as own:
        return _Planner(own, made, batch, rates, tried_on).plan(devices, limit)


@contextmanager
def _ready(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[pl.LightningModule]:
    """A copy of the module, as a Trainer has it before the first step. Large tensors lie in files."""
    with DiskOffload():
        own = copy.deepcopy(module)
        own.trainer = trainer
        trainer.strategy.connect(own)
        trainer.state.fn = TrainerFn.FITTING
        own.setup("fit")
        own.configure_model()
        trainer.precision_plugin.convert_module(own)
    own.train()
    with as_in(trainer, own), logging_through(own, discard):
        yield own


class _Planner:
    def __init__(
        self, module: pl.LightningModule, trainer: pl.Trainer, batch: Any, device: Device, tried_on: torch.device
    ) -> None:
        self._module, self._trainer, self._device, self._tried_on = module, trainer, device, tried_on
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        self._batch = module.on_after_batch_transfer(batch, 0)
        try:
            self._samples: int | None = batch_size(self._batch)
        except ValueError:
            self._samples = None  # it can't be split
        self._state = self._optimizer_state()
        self._cuts: dict[Any, Partition | ValueError] = {}
        self._moved: dict[Any, tuple[int, ...] | None] = {}  # the numbers of layers, where cuts are moved

    def plan(self, devices: int, limit: int | None) -> Plan:
        samples = self._samples or 1
        share = max(1, samples // devices)
        sizes = max(1, share // 4), max(share, min(samples, 2))
        profile = Profile(
            self._module,
            self._step_of,
            sizes,
            self._device,
            self._tried_on,
            self._trainer.precision_plugin.forward_context,
        )
        found: list[Row] = []
        refused: dict[str, str] = {}
        for choice in choices(devices, samples):
            if choice.strategy == "tensor_parallel":
                continue
            try:
                row = self._row(choice, profile, devices, limit)
                if not row.fits and choice.is_pipeline:
                    found.append(row)
                    row = self._row(with_checkpointing(choice), profile, devices, limit)
                found.append(row)
            except ValueError as error:
                refused.setdefault(str(choice), _first_sentence(error))
        found.sort(key=_rank)
        if devices > 1:
            refused["tensor_parallel"] = "It isn't planned yet."
        kind = f"{devices} x {self._device.name}"
        return Plan(found, refused, limit, kind, list(self._notes(profile)))

    def _row(self, choice: Choice, profile: Profile, devices: int, limit: int | None) -> Row:
        parts = self._refused_or_cut(choice)
        samples = -(-(self._samples or 1) // (choice.data * choice.microbatches))
        if choice.is_pipeline and choice.stages > 1:
            choice = self._by_time(choice, parts, profile, samples)
            parts = self._cut(choice)
        chunks = profile.chunks(parts, samples, recompute=choice.recompute)
        memory = on_each_stage(choice, self._module, self._state, parts, chunks)
        goes_on = choice.is_pipeline and not choice.is_late and self._goes_on(choice, parts)
        time = of_step(choice, self._device, parts, chunks, memory, goes_on=goes_on)
        fits = limit is None or MARGIN * max(each.total for each in memory) <= limit
        return Row(choice, chunks, memory, time, self._samples or 1, self._tokens(), devices, fits)

    # -- where the module is cut -----------------------------------------------------------------------------------

    def _refused_or_cut(self, choice: Choice) -> Partition:
        if choice.is_pipeline:
            refuse_manual_optimization(self._module)
            refuse_training(self._module)
            if len(self._trainer.strategy.optimizers) > 1:
                raise ValueError(SEVERAL_OPTIMIZERS)
            if self._samples is None and choice.microbatches > 1:
                raise ValueError("The batch can't be split into microbatches.")
        if choice.is_late:
            refuse_hooks(self._trainer, self._module)
        parts = self._cut(choice)
        if choice.is_late:
            refuse_ties(self._module, parts)
        return parts

    def _cut(self, choice: Choice) -> Partition:
        key = choice.placement, choice.balance, choice.recompute, choice.is_late
        if key not in self._cuts:
            step, _ = self._step_of(1)
            find = partial(partition, self._module, step, choice.stages, placement=choice.placement)
            balance = "parameters" if choice.balance is None else choice.balance
            try:
                self._cuts[key] = find(None, balance, recompute=choice.recompute, keep_together=choice.is_late)
            except ValueError as error:
                self._cuts[key] = error
            except Exception as error:  # any: of the user's step
                self._cuts[key] = ValueError(f"The step can't be traced: {type(error).__name__}: {error}")
        found = self._cuts[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _by_time(self, choice: Choice, parts: Partition, profile: Profile, samples: int) -> Choice:
        """The layout with its cuts moved, if the slowest stage gets faster by it."""
        key = choice.placement, choice.is_late
        if key not in self._moved:
            seconds = profile.seconds(parts, samples)
            bounds = balanced([round(1e9 * each) for each in seconds], parts.chunks, [True] * len(seconds))
            moved = tuple(b - a for a, b in pairwise(bounds))
            self._moved[key] = None
            with suppress(ValueError):  # no cut may be there
                other = self._cut(replace(choice, balance=moved))
                slowest, faster = (max(_of_stages(profile, each, samples)) for each in (parts, other))
                self._moved[key] = moved if slowest > _WORTH * faster else None
        return replace(choice, balance=self._moved[key])

    def _goes_on(self, choice: Choice, parts: Partition) -> bool:
        if not gained(choice.schedule()):
            return False
        trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        shared = [name for name in parts.shared() if name in trained]
        plugin = self._trainer.precision_plugin
        return not any(True for _ in reasons_to_wait(self._trainer, self._module, plugin, shared))

    # -- the step, and the optimizer ---------------------------------------------------------------------------------

    def _step_of(self, samples: int) -> tuple[Callable[[], Any], int]:
        """The step on a microbatch of about so many samples, and their number."""
        part = self._batch
        if self._samples is not None:
            part = split(part, max(1, self._samples // samples))[0]
        takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
        indices = [0] if takes_index else []
        return lambda: self._module.training_step(cloned(part), *indices), batch_size(part) if self._samples else 1

    def _optimizer_state(self) -> State:
        strategy = self._trainer.strategy
        strategy.optimizers = []  # what stands in for them while the step is traced
        try:
            strategy.setup_optimizers(self._trainer)
            return State(self._module, strategy.optimizers)
        except Exception:  # any: of the user's method, which may need a run
            strategy.optimizers = []
            return State(self._module, None)

    def _tokens(self) -> int | None:
        """The tokens of a sample, where the batch has integers in two dimensions."""
        leaves = [x for x in tree_leaves(self._batch) if isinstance(x, Tensor)]
        return next((x.shape[1] for x in leaves if x.dim() == 2 and not x.dtype.is_floating_point), None)

    def _notes(self, profile: Profile) -> Iterator[str]:
        how = "timed" if self._device.measured else "by its data sheet, at half of the peak"
        latency, link = 1e6 * self._device.latency, self._device.link / 1e9
        yield f"Layers: {self._device.name}, {how}. A message: {latency:.0f} us, and its bytes at {link:.3g} GB/s."
        yield f"Memory is that of tensors on the fullest rank; to fit, {MARGIN - 1:.0%} more has to be there."
        if self._state.problem:
            yield f"The optimizer's state is assumed to be two tensors for each parameter: {self._state.problem}."
        if profile.untried:
            names = first_few(sorted(profile.untried))
            yield f"By their operations alone, since they fail on random inputs: {names}."
        if any(getattr(part, "track_running_stats", False) for part in self._module.modules()):
            yield "BatchNorm sees a microbatch, or a replica's share: not the numbers of one process, by nature."
        if is_overridden("configure_gradient_clipping", self._module):
            yield "configure_gradient_clipping makes stages wait for each other at each update."


def _of_stages(profile: Profile, parts: Partition, samples: int) -> list[float]:
    """Of each stage, for a microbatch."""
    sums = [0.0] * parts.stages
    for chunk, cost in zip(parts.placement, profile.chunks(parts, samples), strict=True):
        sums[chunk] += cost.forward + cost.backward
    return sums


def _rank(row: Row) -> tuple[bool, bool, float]:
    return not row.fits, row.choice.is_late, row.time.total if row.fits else float(row.needed)


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].rstrip(".") + "."


