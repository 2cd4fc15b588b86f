"""Takes a batch before training, to trace the step with, from the loader that Lightning will use. The loader stays as
it was.

Lightning is handed the same loader later, so the user's hook that makes it is called once. (It is called again before a
checkpoint is restored, since the loader may depend on that.) The batch comes from an iterator of its own, with the
generators put back, so training sees the same samples in the same order, the first batch included. Of a stream, or a
loader of another kind than torch's, training goes on with that iterator (``read_ahead.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_parallel.batch import samples_of, split
from lightning_parallel.loading.loaders import with_one_worker
from lightning_parallel.loading.read_ahead import ReadAhead
from lightning_parallel.private.lightning.data import LoaderSource, before_batch_transfer, mode_of
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.logs import trial
from lightning_parallel.seeding import Generators
from lightning_parallel.tracing.own_generators import is_own_generator

_FEW = 4  # samples

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def first_step(run: Run) -> partial[Any]:
    """The first step that the Trainer is going to run, bound to a batch on the module's present device.

    Raises:
        ValueError: there is no batch, or a loader couldn't give it again.
    """
    trainer, module = run.trainer, run.module
    assert trainer.state.fn is not None
    name = STEPS[trainer.state.fn]
    step = getattr(module, name)
    with Generators(trainer.strategy.root_device).kept():
        source = LoaderSource(trainer)
        loader = source.get()
        if trainer.ckpt_path is None:  # otherwise the loader may depend on what the checkpoint restores
            source.hand_over(loader)
        batch, one_after_another = _first_batch(loader, name)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = before_batch_transfer(module, batch)
        batch = trainer.strategy.batch_to_device(batch, device=module.device)
    indices = [0] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
    if one_after_another:
        indices.append(0)  # dataloader_idx
    return partial(step, batch, *indices)


def trial_of(run: Run) -> Callable[[], None]:
    """A function that runs the first step on some samples. What a run changes in the module, the caller has to undo.

    Raises:
        RuntimeError: with manual optimization. There are no optimizers yet.
    """
    trainer, module = run.trainer, run.module
    if not module.automatic_optimization:
        raise RuntimeError("with manual optimization it can't be run ahead")
    step = first_step(run)
    batch, *others = step.args
    size = samples_of(batch)
    few = batch if size is None else split(batch, -(-size // _FEW))[0]  # whatever it is, the step takes it

    def run_on_few() -> None:
        with trial(trainer, module), as_in(trainer, module):
            try:
                step.func(few, *others)
            except Exception:  # it may need all samples
                if few is batch:
                    raise
                step()

    return run_on_few


@contextmanager
def as_in(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Inside, the module's parts are in the mode in which Lightning will run them, in the Trainer's precision."""
    before = {part: part.training for part in module.modules()}
    try:
        if trainer.state.fn != TrainerFn.FITTING:
            module.eval()
        with trainer.precision_plugin.forward_context(), _with_optimizer(trainer):
            yield
    finally:
        for part, training in before.items():
            part.training = training


@contextmanager
def _with_optimizer(trainer: pl.Trainer) -> Iterator[None]:
    """Inside, a step that asks for its optimizer or scheduler, to log a learning rate, gets a substitute: its own are
    made after the module is divided."""
    strategy = trainer.strategy
    if strategy.optimizers:
        yield
        return
    optimizer = torch.optim.AdamW([torch.zeros(())], lr=1.0)
    strategy.optimizers = [optimizer]
    strategy.lr_scheduler_configs = [LRSchedulerConfig(LambdaLR(optimizer, lambda step: 1.0))]
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = [], []


def _first_batch(loader: Any, step: str) -> tuple[Any, bool]:
    """The first batch of a ``loader``, and whether it is from one of several, which are read one after another."""
    if isinstance(loader, CombinedLoader):
        combined = CombinedLoader(loader.iterables, mode_of(loader))
    else:
        combined = CombinedLoader(loader, "max_size_cycle" if step == "training_step" else "sequential")
    for each in combined.flattened:
        # One of Python's own iterators, to which nothing can be added. Others can be handed on, or are rewound.
        if isinstance(each, Iterator) and not isinstance(each, Sized) and not hasattr(each, "__dict__"):
            raise ValueError(
                f"A loader of {step} is a {type(each).__name__}, which gives each batch once: the dry run of the step "
                f"would take its first batch. Give a DataLoader, a list, or a class with an __iter__."
            )
    combined.flattened = [_of_its_own(each) for each in combined.flattened]
    try:
        batch, *_ = next(iter(combined))
        for each in combined.flattened:
            if isinstance(each, ReadAhead):
                each.hand_on()
    except StopIteration:
        raise ValueError(
            f"The loader of {step} gives no batch. The model is divided by a dry run of {step}, which needs one."
        ) from None
    return batch, len(combined.flattened) > 1 and mode_of(combined) == "sequential"


def _of_its_own(loader: Any) -> Any:
    """A loader over the same data that can be iterated without an effect on the given one. A worker opens what the
    dataset opens when it is read, so later workers don't share it, and reads its own copy of a stream."""
    is_table = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_table and not getattr(loader, "num_workers", 0):
        return ReadAhead(loader)
    own = with_one_worker(loader)
    own.prefetch_factor = 1 if own.num_workers else None
    copies: dict[int, Any] = {}
    for name in ("generator", "dataset", "sampler", "batch_sampler") if is_table else ("generator",):
        if hasattr(loader, name):
            object.__setattr__(own, name, _with_its_own_state(getattr(loader, name), copies))
    return own


def _with_its_own_state(part: Any, copies: dict[int, Any]) -> Any:
    """A copy of a generator, or of a dataset or a sampler that draws from copies of its generators, and counts by
    itself: some count their epochs or samples. What else it holds is shared, since it may be large. Other objects are
    given back, and those that close something at their end.

    Args:
        copies: those that have been made, by the id of the original. They may refer to each other.
    """
    kind: Any = type(part)
    if id(part) in copies:
        return copies[id(part)]
    if is_own_generator(part):
        copies[id(part)] = part.clone_state() if isinstance(part, torch.Generator) else copy.deepcopy(part)
        return copies[id(part)]
    if not hasattr(part, "__dict__") or kind.__new__ is not object.__new__ or hasattr(kind, "__del__"):
        return part
    own = copies[id(part)] = object.__new__(kind)
    for name, value in vars(part).items():
        is_of_loader = name == "sampler" or id(value) in copies  # which may be of any class
        is_state = is_of_loader or isinstance(value, Dataset | Sampler) or is_own_generator(value)
        vars(own)[name] = _with_its_own_state(value, copies) if is_state else value
    return own
