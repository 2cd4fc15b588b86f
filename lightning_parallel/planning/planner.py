"""``lightning_parallel.plan``: which layout for this module, these devices and this memory, and what it will cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_parallel.comparison.runs import loader_of, trainer_of
from lightning_parallel.comparison.timing import Measured, TrialFailed, measured
from lightning_parallel.costs.devices import Device, as_one_of, described, here
from lightning_parallel.costs.loading import Loaded, first_batch
from lightning_parallel.planning.layouts import Choice, choices, tensor_sizes, thriftier
from lightning_parallel.planning.memory import on_each_stage
from lightning_parallel.planning.planned_module import PlannedModule, ready
from lightning_parallel.planning.step_time import of_step
from lightning_parallel.planning.table import MARGIN, Plan, Row, one_of_each
from lightning_parallel.seeding import Generators
from lightning_parallel.settings import ByteSize, bytes_of


def plan(
    module: pl.LightningModule,
    data: Any,
    *,
    devices: int = 2,
    memory: str | None = None,
    device: str = "here",
    precision: str = "32-true",
    measure: int = 0,
    **trainer: Any,
) -> Plan:
    """The layouts of a module over some devices, ranked by the time of a step, with the memory that each needs.

    ::

        print(lightning_parallel.plan(MyModule(), next(iter(loader)), devices=4, memory="2GiB"))

    Nothing is trained, and the module and the random generators stay as they are. A copy of the module runs its step on
    tensors without values; one layer of each kind runs on this machine. It takes seconds.

    What it doesn't know: other GPUs than those it tries layers on but by their data sheets, contention of links, the
    memory of CUDA and of the process itself.

    Args:
        module: what is to be trained.
        data: a batch of all replicas together; or a LightningDataModule or a DataLoader, whose first one is taken. Then
            a step's time has that of loading.
        devices: their number.
        memory: of each, such as ``"24GiB"``. None: no limit.
        device: ``"here"``: layers are timed on this machine's GPU or CPU. ``"a100"``, ``"h100"``, ``"h200"``, ``"l4"``:
            times are those of the data sheet, at half of the peak.
        precision: as the Trainer's.
        measure: run so many of the best layouts for a few steps, in processes of this machine, which needs the devices.
            They are ranked by what was measured, and by the time of loading. Call it under
            ``if __name__ == "__main__":``, since the processes import the script.
        **trainer: other arguments of the Trainer, such as ``gradient_clip_val``, for which stages wait.

    Raises:
        ValueError: a value that its setting doesn't take, or there are fewer devices than are to be measured. That
            nothing fits is said by :attr:`.Plan.best`.
    """
    if devices < 1:
        raise ValueError(f"devices={devices}: give 1 or more.")
    if memory is not None and memory not in ByteSize():
        raise ValueError(f"memory={memory!r}: give a size, {ByteSize()}.")
    limit = None if memory is None else bytes_of(memory)
    _refuse_to_measure(measure, devices, device)
    tried_on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Generators(tried_on).kept():
        halves = precision.startswith(("bf16", "16"))
        rates = here(tried_on, devices) if device == "here" else described(device, halves=halves)
        loaded = Loaded(data)
        if isinstance(data, pl.LightningDataModule | DataLoader):
            with as_one_of(devices if device == "here" else 1, tried_on):
                loaded = first_batch(loader_of(module, data, {"accelerator": "cpu"}))
        made = trainer_of(devices=1, accelerator="cpu", precision=precision, **trainer)
        ranked = _ranked(module, made, loaded, rates, tried_on, devices, limit)
    arguments = {"accelerator": tried_on.type, "precision": precision, **trainer}

    def run(choice: Choice) -> Measured:
        return measured(choice.strategy, choice.options, module, loaded.batch, devices, arguments)

    return _with_trials(ranked, measure, run)


def _ranked(
    module: pl.LightningModule,
    trainer: pl.Trainer,
    loaded: Loaded,
    device: Device,
    tried_on: torch.device,
    devices: int,
    limit: int | None,
) -> Plan:
    """All layouts, by what they are predicted to take."""
    found: list[Row] = []
    refused: dict[str, str] = {}
    notes: list[str] = []
    for tensor in tensor_sizes(devices):
        with ready(module, trainer) as own:
            try:
                planned = PlannedModule(own, trainer, loaded, device, tried_on, tensor=tensor, devices=devices)
            except ValueError as error:  # it can't be divided
                refused[f"{tensor} tensor ranks"] = _first_sentence(error)
                continue
            for choice in choices(devices, planned.samples, tensor, planned.cuts.layers):
                found += _rows(choice, planned, limit, refused)
            notes += planned.notes()
    found.sort(key=lambda row: (not row.fits, row.choice.is_late, row.seconds if row.fits else row.needed))
    notes = [*_on_all(device, devices), *loaded.notes(), *dict.fromkeys(notes)]
    return Plan(found, refused, limit, f"{devices} x {device.name}", notes)


def _refuse_to_measure(measure: int, devices: int, device: str) -> None:
    if measure < 0:
        raise ValueError(f"measure={measure}: give 0 or more.")
    if measure and device != "here":
        raise ValueError(f"measure={measure}, device={device!r}: layouts run on this machine; leave out one of them.")
    if measure and torch.cuda.is_available() and torch.cuda.device_count() < devices:
        raise ValueError(
            f"measure={measure}, devices={devices}: this machine has {torch.cuda.device_count()}. Leave measure out, "
            f"or plan where the devices are."
        )


def _with_trials(plan: Plan, count: int, run: Callable[[Choice], Measured]) -> Plan:
    """The plan, with its best layouts run: those that ran come first, and those that failed are refused."""
    best = one_of_each(plan.rows)[:count]
    ran, refused = [], dict(plan.refused)
    for row in best:
        try:
            ran.append(replace(row, measured=run(row.choice)))
        except TrialFailed as error:
            refused[str(row.choice)] = f"It failed when it was run: {error}"
    others = [row for row in plan.found if row not in best and str(row.choice) not in refused]
    found = [*sorted(ran, key=lambda row: row.seconds), *others]
    found.sort(key=lambda row: (not row.fits, row.choice.is_late))
    return replace(plan, found=found, refused=refused)


def _rows(choice: Choice, planned: PlannedModule, limit: int | None, refused: dict[str, str]) -> Iterator[Row]:
    """A layout, and where it holds less, up to one that fits. What can't train the module is added to ``refused``."""
    for each in chain([choice], thriftier(choice, planned.samples)):
        try:
            row = row_of(each, planned, limit)
        except ValueError as error:
            refused.setdefault(str(each), _first_sentence(error))
            if each is choice:
                return
            continue
        yield row
        if row.fits:
            return


def row_of(choice: Choice, planned: PlannedModule, limit: int | None) -> Row:
    """One layout of a plan.

    Raises:
        ValueError: the module doesn't allow it.
    """
    device, devices = planned.device, planned.devices
    samples = -(-planned.samples // (choice.data * choice.microbatches))
    choice, parts = planned.cuts.best(choice, planned.profile, samples)
    chunks = planned.profile.chunks(parts, samples, recompute=choice.recompute)
    own_memory = device.at_once is None  # then the next batch, which Lightning has fetched, waits on the host
    batches = planned.nbytes // choice.data * (1 if own_memory else 2)
    memory = on_each_stage(choice, planned.tensors, planned.updates, parts, chunks, batches, device.channels)
    divided = choice.sharded or choice.strategy == "fully_sharded"
    updates = [planned.updates.seconds(held, divided=divided) for held in planned.tensors.held(choice, parts)]
    time = partial(of_step, choice, device, parts, chunks, memory, updates, waits=planned.cuts.waits(parts))
    fits = limit is None or MARGIN * max(each.total for each in memory) <= limit
    waited = partial(planned.loaded.waited, replicas=choice.data, speed=device.speed(devices))
    return Row(choice, chunks, memory, time, planned.samples, planned.tokens(), devices, fits, waited)


def _on_all(device: Device, devices: int) -> Iterator[str]:
    """What all rows rest on."""
    how = "timed" if device.measured else "by its data sheet, at half of the peak"
    link = f"{1e6 * device.latency:.0f} us, and its bytes at {device.link / 1e9:.3g} GB/s"
    yield f"Layers: {device.name}, {how}. A message: {link}."
    nccl = ""
    if devices > 1 and any(device.channels):
        of_groups, of_messages = device.channels
        nccl = f" and of NCCL's buffers (for {of_groups} channels in a group, {of_messages} between stages)"
    yield f"Memory is that of tensors{nccl} on the fullest rank; to fit, {MARGIN - 1:.0%} more has to be there."


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].rstrip(".") + "."
