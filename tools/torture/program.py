"""A run as a user starts it, ``python -m recipes.train``, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from recipes import ROOT
from tools.torture.fault import FAULTY_STEP, SAVES_EVERY

STEPS = 3 * FAULTY_STEP

COMMON = (
    "model=mlp", "~model.name", "+model._target_=tools.torture.model.Probed", "+model.optimizer=${optimizer}",
    "+model.scheduler=${scheduler}", "model.width=16", "model.layers=4", "model.dropout=0.1",
    "data=digits", "data.batch_size=12", "scheduler.warmup_steps=0",
    f"trainer.max_steps={STEPS}", f"trainer.val_check_interval={SAVES_EVERY}", "trainer.limit_val_batches=2",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false", "print_config=false",
    "callbacks.checkpoint.monitor=null", "callbacks.checkpoint.filename='step-{step}'",
    f"+callbacks.checkpoint.every_n_train_steps={SAVES_EVERY}", "resume=auto",
)  # fmt: skip


class Process(Protocol):
    """What is used of :class:`subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""


@dataclass(slots=True)
class Program:
    """A run that has been started.

    Args:
        process: of the launcher.
        folder: of the run. It is in the command line of each of its processes.
    """

    process: Process
    folder: Path

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self.folder.with_suffix(".txt").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Those that run, zombies left out."""
        return processes(self.folder)

    def wait(self, seconds: float) -> int | None:
        """The exit code; None if it hasn't ended by then."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, seconds))
        return None

    def left_after(self, seconds: float) -> list[str]:
        """The processes that are still there by then, described; none as soon as all have gone."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [*filter(None, map(_described, left))]


def processes(folder: Path) -> list[psutil.Process]:
    """Those whose runs are in a folder, zombies left out."""
    return [each for each in psutil.process_iter() if _belongs(each, folder)]


@contextmanager
def started(
    folder: Path, overrides: Sequence[str], popen: Callable[..., Process] = subprocess.Popen
) -> Iterator[Program]:
    """Start a run in a folder. In the end nothing of it is left.

    Args:
        folder: of the run. What it prints is beside it.
        overrides: of the config.
        popen: starts the launcher.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    data = f"paths.data_dir={folder.parent / 'data'}"
    command = [sys.executable, "-m", "recipes.train", *COMMON, data, f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".txt").open("ab") as output:
        process = popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    program = Program(process, folder)
    try:
        yield program
    finally:
        for left in program.processes():
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def _described(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):  # it may just have ended
        return f"{' '.join(process.cmdline()[-2:])}, {process.status()}"
    return None


def _belongs(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return str(folder) in command and " recipes." in command and process.status() != psutil.STATUS_ZOMBIE
    return False
