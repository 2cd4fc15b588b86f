"""Trains an entry on one rank, inside a worker of the pool."""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import numpy
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel.private.torch.tensors import tree_leaves
from tools.others.captured import shared
from tools.others.entry import BATCH, STEPS
from tools.others.layouts import ASYNCHRONOUS, find
from tools.zoo.layouts import Layout
from tools.zoo.precision import everything_in
from tools.zoo.training import PACKAGE, Report, Witness, collect, load, reported

_PASSED_ON = ("warnings.py", "rank_zero.py")  # files whose functions warn in the name of others


class Notes(Witness):
    """Notes losses, updates, whether steps draw random numbers, and the weights after the steps that are compared.

    An asynchronous pipeline is made to finish each of these, so that its gradients aren't late and can be compared with
    one process. It goes on for as many steps without.
    """

    def __init__(self, report: Report, *, drains: bool) -> None:
        super().__init__(report)
        self.drains = drains
        self.state: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.state = _drawn()
        if batch_idx < STEPS:
            self.report.batches.append(_digest(batch))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.report.draws |= self.state != _drawn()
        if batch_idx >= STEPS:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # where a module optimizes by itself
            self.losses.append(loss)
        if self.drains:
            trainer.save_checkpoint(f"step-{batch_idx}.ckpt")
        if batch_idx == STEPS - 1:
            collect(self.report, trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if not self.report.weights:  # the loader has fewer batches
            collect(self.report, trainer, module)
        super().on_train_end(trainer, module)


def train(room: str, name: str, layout_name: str, layers: tuple[str, ...] = ()) -> Report:
    """Train an entry on this rank of a layout. Errors are reported, not raised."""

    def run(report: Report) -> None:
        entry = load(room, name)
        with everything_in(entry.dtype), _noted(report.warnings):
            _fit(entry, find(layout_name), report, layers)

    return reported(run)


def _fit(entry: Any, layout: Layout, report: Report, layers: tuple[str, ...]) -> None:
    module, loaders = entry.make(BATCH // layout.ranks if layout.shares else BATCH)
    drains = layout.name == ASYNCHRONOUS
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": layout.ranks,
        "strategy": layout.make(layers),
        "max_epochs": 1,
        "limit_train_batches": 2 * STEPS if drains else STEPS,
        "limit_val_batches": 1 if entry.validates else 0,
        "logger": CSVLogger("logs"),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "callbacks": [Notes(report, drains=drains)],
    }
    trainer = L.Trainer(**(settings | entry.trainer))
    if layout.shares and "train_dataloaders" in loaders:
        loaders["train_dataloaders"] = shared(loaders["train_dataloaders"], layout.ranks, trainer.global_rank)
    random.seed(11)
    numpy.random.seed(11)
    torch.manual_seed(11)
    trainer.fit(module, **loaders)


def _digest(batch: Any) -> str:
    values = [tensor.detach().cpu().numpy().tobytes() for tensor in _tensors(batch)]
    return hashlib.blake2b(b"".join(values), digest_size=8).hexdigest()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):  # an object of the package's own
            yield from _tensors(vars(leaf))


def _drawn() -> Any:
    """Changes when random numbers are drawn."""
    of_numpy: Any = numpy.random.get_state()
    return torch.random.get_rng_state().numpy().tobytes(), of_numpy[2], random.getstate()[1][-1]


@contextmanager
def _noted(found: list[str]) -> Iterator[None]:
    """Appends to ``found`` what lightning_parallel warns of inside."""

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if _is_own(sys._getframe(1)):
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def _is_own(frame: FrameType | None) -> bool:
    while frame is not None and Path(frame.f_code.co_filename).name in _PASSED_ON:
        frame = frame.f_back
    return frame is not None and Path(frame.f_code.co_filename).is_relative_to(PACKAGE)
