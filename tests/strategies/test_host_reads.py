"""Where, in a whole training of a Trainer's, the host reads the value of a tensor: known places only.

On a GPU each read would wait until the device has done all that was launched before. Here every tensor is on the CPU,
so a read is known by the function that reads. `docs/gpu.md` lists those that read from the device. What reads without a
method of a tensor's in Python isn't seen here: copies to the host, and functions of torch's that wait inside.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import PerformanceMonitor
from tests.strategies.harness import ALL, make_trainer

READS = [
    "item", "tolist", "numpy", "cpu", "nonzero", "equal", "unique", "masked_select", "allclose", "__bool__",
    "__float__", "__int__", "__index__", "__array__", "__format__",
]  # fmt: skip
FIRST, LAST = 2, 4  # batches; before, formats and names are announced

# By file and function: how much it reads in a batch, at most (so many would not be reached by one that reads for each
# layer or parameter), and what.
KNOWN: dict[str, tuple[int, str]] = {
    "optimizer.py _get_value": (200, "the optimizer's count of steps"),
    "meeting.py highest": (1, "what ranks tell each other of signals"),
    "message.py __init__": (8, "the words of a packet"),
    "late_values.py _take": (1, "the names of metrics, from host to host"),
    "late_values.py <genexpr>": (4, "the loss and the metrics, which came from host to host"),
    "late_values.py <dictcomp>": (1, "metrics of the progress bar, which came from host to host"),
    "values.py <dictcomp>": (2, "what a trial of two microbatches logs, in batches 2, 3, 5, 9, ..."),
    "reads_of_shards.py __torch_function__": (8, "tensor ranks compare steps 1, 2, 3, 5, 8, ..., which are watched"),
    "collectives.py guarded": (8, "what they tell each other then, from host to host"),
    "trial.py _mean": (8, "numbers of such a trial"),
    "trial.py outcome": (2, "the losses of such a trial"),
    "graph.py number_of": (12, "what a microbatch's loss averages over; on a GPU it stays there"),
    "averaging.py finish": (1, "which gradients of shared parameters there are"),
    "averaging.py summed_over": (1, "the same over NCCL, from host to host"),
    "uses.py compare": (1, "whether replicas have used the same modules, from host to host"),
    "dropout.py enter": (20, "the state of torch's generator"),
    "batch.py fingerprint": (4, "whether ranks load the same batches, in batches 0, 1, 2, 4, 8, ... of an epoch"),
    "loaders.py _compare": (1, "what they have found"),
    "parted_options.py _compare": (1, "whether replicas use the same rates, in batches 0, 1, 2, 4, ..."),
    "collectives.py together": (1, "what they have found"),
    "logger_connector.py on_batch_end": (1, "Lightning's: metrics of the progress bar"),
    "logger_connector.py update_train_step_metrics": (1, "Lightning's: metrics of loggers, at log intervals"),
}


class Watch(Callback):
    """Counts reads, by the innermost function outside of torch and of helpers."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._patches: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self._patches = [patch.object(Tensor, name, self._counted(getattr(Tensor, name))) for name in READS]
            for each in self._patches:
                each.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == LAST:
            for each in self._patches:
                each.stop()

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found[_place()] += 1
            return read(tensor, *args, **kwargs)

        return counted


def _place() -> str:
    """The innermost function outside of torch, and of the helpers below, which only pass a read on."""
    frame: Any = sys._getframe(2)
    helpers = (
        "apply_func.py", "watching.py", "recording.py call", "loss_terms.py numbers", "result.py metrics",
        "collectives.py highest", "collectives.py all_alike",
    )  # fmt: skip
    while True:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        named = f"{os.path.basename(file)} {function}"
        in_torch = "/torch/" in file and "/optim/" not in file
        if not (in_torch or file == __file__ or function == "metrics" or named.startswith(helpers)):
            return named
        frame = frame.f_back


def reads(strategy: str, model: str, options: dict[str, Any], trainer_options: dict[str, Any]) -> Counter[str]:
    watch = Watch()
    callbacks = [watch, PerformanceMonitor()]
    given = trainer_options | {"max_epochs": 1, "limit_train_batches": LAST + 1, "log_every_n_steps": 1}
    trainer = make_trainer(strategy, callbacks, options, **given)
    trainer.fit(ALL[model](), ALL[model].loader(False, 2))
    return watch.found


@pytest.mark.parametrize(("strategy", "model", "options", "trainer_options"), [
    ("sync", "GPT2", {"schedule": "1f1b", "microbatches": 2}, {"gradient_clip_val": 0.5}),
    ("sync", "Blocks", {"schedule": "zbv", "microbatches": 2}, {}),
    ("async", "GPT2Untied", {}, {}),
    ("tensor", "ShardableGPT2", {}, {"gradient_clip_val": 0.5}),
    ("fsdp", "GPT2", {}, {}),
])  # fmt: skip
def test_the_host_reads_nothing_but_what_is_known(
    launch: Any, strategy: str, model: str, options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    found = launch(reads, 2, strategy, model, options, trainer_options)
    batches = LAST - FIRST + 1
    for each in found:
        assert each.keys() <= KNOWN.keys(), each
        assert all(count <= batches * KNOWN[place][0] for place, count in each.items()), each
    assert sum(found, Counter())["optimizer.py _get_value"] > 0  # reads are seen
