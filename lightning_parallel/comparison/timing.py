"""Runs a layout for a few steps, in processes of its own: what they take in seconds and bytes.

A rank computes with its share of the machine's cores. What else the machine does is in the seconds.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_parallel.comparison.check import layout_of
from lightning_parallel.comparison.held import Held
from lightning_parallel.comparison.runs import Shares, trainer_of

STEPS = 3
# A pipeline tries losses in batches 0, 1, 2, 4, 8, ..., which takes time and memory of its own. The first batches are
# traced. And to count the memory of a batch, a buffer has to have been used before.
_BEGIN, _COUNTED, _FIRST = 2, 3, 5
_LIMIT = 300.0  # seconds for one layout, with the start of its processes
_LEAVING = 10.0  # seconds in which a process that has been killed must have ended


def threads_of_rank(ranks: int) -> int:
    """The threads that each of some ranks on this machine computes with on a CPU: its share of the cores."""
    return max(1, (os.cpu_count() or 1) // ranks)


def kept_waiting() -> float:
    """Seconds in which this thread could have run, and others had the cores; 0 where the system doesn't tell."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


class TrialFailed(Exception):
    """A layout couldn't be run, or took too long. The message is the error's of a rank."""


@dataclass(frozen=True)
class Measured:
    """What a few steps have taken, on one rank, or on all ranks of a layout.

    Attributes:
        seconds: of a step, the median; of all ranks that of the slowest.
        held: bytes of tensors at once; of all ranks those on the fullest.
    """

    seconds: float
    held: int

    @classmethod
    def of_ranks(cls, ranks: Iterable[Self]) -> Self:
        """Of each number the largest."""
        return cls(*map(max, zip(*map(astuple, ranks), strict=True)))


def measured(
    strategy: str,
    options: Mapping[str, Any],
    module: pl.LightningModule,
    batch: Any,
    devices: int,
    trainer: Mapping[str, Any],
) -> Measured:
    """Run a layout in so many processes, which end with it.

    Args:
        strategy, options: as :func:`.check` takes them; or Lightning's ``"ddp"``.
        batch: of all replicas together.
        trainer: arguments of the Trainer.

    Raises:
        TrialFailed: the module can't be sent to processes, a rank has raised an error, or it took too long.
    """
    with tempfile.TemporaryDirectory(prefix="lightning-parallel-") as folder:
        try:
            torch.save((strategy, dict(options), module, batch, dict(trainer)), Path(folder) / _GIVEN)
        except Exception as error:  # any: of the user's class
            raise TrialFailed(f"The module and its batch can't be sent to other processes: {error}") from error
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = torch_multiprocessing.start_processes(  # type: ignore[attr-defined]
            _rank, (devices, store.port, folder), devices, join=False, daemon=True, start_method="spawn"
        )
        assert context is not None, "join=False gives a context"
        end = time.monotonic() + _LIMIT
        try:
            while not context.join(max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    raise TrialFailed(f"It hadn't ended after {_LIMIT:.0f} s.")
        except ProcessRaisedException as error:
            raise TrialFailed(_last_line(error)) from error
        except ProcessExitedException as error:
            guard = 'A script has to call it under if __name__ == "__main__":.'
            raise TrialFailed(f"{_last_line(error)}. {guard}") from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join(_LEAVING)
        return Measured.of_ranks([pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(devices)])


_GIVEN = "given"


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else type(error).__name__


def _end_with_parent() -> None:
    """End this process when the one that has started it has ended, whatever the rank waits for. torch does so on Linux
    only, by an interrupt."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by another process"
    parent.join()
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows each signal ends it at once


def _rank(rank: int, devices: int, port: int, folder: str) -> None:
    Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # As torch's elastic agent would set it.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(devices),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(devices),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="plan",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(threads_of_rank(devices))
    strategy, options, module, batch, trainer = torch.load(Path(folder) / _GIVEN, weights_only=False)
    found = on_rank(strategy, options, module, batch, devices, trainer | {"plugins": [TorchElasticEnvironment()]})
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    if dist.is_initialized():
        dist.barrier()  # none closes its connections while another one needs them
        dist.destroy_process_group()


def on_rank(
    strategy: str,
    options: Mapping[str, Any],
    module: pl.LightningModule,
    batch: Any,
    devices: int,
    trainer: Mapping[str, Any],
    *watches: Callback,
    steps: int = STEPS,
) -> Measured:
    """Train a copy of a module for a few steps, as one of the ranks of a layout. All ranks call it."""
    layout: Any = strategy if strategy == "ddp" else layout_of(strategy, dict(options), 2)
    numbers = timed(steps)
    shares, clock = Shares([batch] * (numbers[-1] + 1)), _Clock(numbers)
    made = trainer_of(shares, clock, *watches, strategy=layout, devices=devices, **trainer)
    made.fit(copy.deepcopy(module), DataLoader(shares, batch_size=None))
    return Measured(median(clock.seconds), clock.held)


def timed(steps: int) -> list[int]:
    """The numbers of the batches whose steps are timed."""
    return [number for number in range(_FIRST, _FIRST + 2 * steps) if number.bit_count() > 1][:steps]


class _Clock(Callback):
    """The seconds of some batches, and before these the bytes that are held in one: counting them takes time."""

    def __init__(self, timed: Collection[int]) -> None:
        self.seconds: list[float] = []
        self.held = 0
        self._timed = timed
        self._watch = Held()
        self._last = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if batch_idx in self._timed:
            self.seconds.append(time.perf_counter() - self._last)
        if batch_idx + 1 == _BEGIN:
            self._watch.add([*pl_module.parameters(), *pl_module.buffers()])  # a batch uses all else that is held
            self._watch.__enter__()
        elif batch_idx + 1 == _COUNTED:
            self._watch.forget()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
        elif batch_idx == _COUNTED:
            self._watch.__exit__(None, None, None)
            on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            self.held = on_gpu or self._watch.most
        self._last = time.perf_counter()
