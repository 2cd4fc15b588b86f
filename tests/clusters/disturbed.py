"""A small training that something happens to, under any cluster, and the numbers that it has to end with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from recipes import ROOT
from recipes.processes import restarts

RECIPE = [
    "strategy=pipeline_1f1b", "model=mlp", "data=digits", "model.width=16", "model.dropout=0.1", "data.batch_size=12",
    "trainer.max_steps=10", "trainer.val_check_interval=5", "trainer.limit_val_batches=2", "trainer.accelerator=cpu",
    "callbacks.checkpoint.monitor=null", "+callbacks.checkpoint.every_n_train_steps=2",
    "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip
SAVED, KILLED = 4, 5  # steps


class KilledOnce(Callback):
    """Kills one rank at a step, unless the run has been started again."""

    def __init__(self, rank: int = 1, step: int = KILLED) -> None:
        self._rank, self._step = rank, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if restarts() == 0 and (trainer.global_rank, trainer.global_step) == (self._rank, self._step):
            os.kill(os.getpid(), signal.SIGKILL)


class HeldOnce(Callback):
    """Waits at a step for a scheduler's SIGTERM, unless the run has been started again."""

    def __init__(self, folder: str) -> None:
        self._reached = Path(folder) / "reached"

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if restarts() or trainer.global_step != KILLED:
            return
        heard, handler = threading.Event(), signal.getsignal(signal.SIGTERM)
        assert callable(handler)

        def hear(number: int, frame: Any) -> None:
            handler(number, frame)
            heard.set()

        signal.signal(signal.SIGTERM, hear)
        self._reached.touch()
        heard.wait(120)
        signal.signal(signal.SIGTERM, handler)


def wait_for(file: Path, seconds: float = 120) -> None:
    """Wait until the file exists."""
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"no {file} within {seconds:g} s"
        time.sleep(0.1)


HOLD = "+callbacks.hold={_target_:tests.clusters.disturbed.HeldOnce,folder:${paths.output_dir}}"
KILL = "+callbacks.kill={_target_:tests.clusters.disturbed.KilledOnce}"


def command(folder: Path, *overrides: str) -> list[str]:
    """``-m recipes.train`` with the recipe, in a folder."""
    folders = [f"hydra.run.dir={folder}/run", f"paths.log_dir={folder}/logs", f"paths.data_dir={folder}/data"]
    return ["-m", "recipes.train", *RECIPE, *folders, *overrides]


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program of the user's: pytest's has variables of other processes."""
    left_out = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | dict(more or {})


def run_beside(program: Sequence[str], environments: Sequence[Mapping[str, str]], seconds: float = 250) -> list[str]:
    """Run a program several times at once, each with variables of its own, to its end; what each has printed.

    Raises:
        AssertionError: one failed.
    """
    started = [start(program, environment) for environment in environments]
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return printed


def start(program: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a program of the checkout, with these variables besides the user's."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(program, cwd=ROOT, env=variables(environment), **pipes)


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def train(folder: Path, *overrides: str) -> str:
    """Run the recipe on this machine."""
    return run_beside([sys.executable, *command(folder, *overrides)], [{}])[0]


def numbers(folder: Path) -> dict[str, float]:
    """The metrics that a run has ended with."""
    return json.loads((folder / "run" / "metrics.json").read_text())  # type: ignore[no-any-return]


def attempts(folder: Path) -> list[tuple[str, int, int, int | None]]:
    """How each attempt of a run ended, from which step to which it came, and the code."""
    said = json.loads((folder / "run" / "run.json").read_text())
    assert said["status"] == "completed"
    return [(each["reason"], each["from_step"], each["to_step"], each["exit"]) for each in said["attempts"]]


def assert_went_on(folder: Path, expected: Mapping[str, float], reason: str = "") -> None:
    """A run that was killed has gone on from where it was saved, to the numbers of one that was left alone."""
    killed, last = attempts(folder)
    assert killed[1:3] in [(0, step) for step in (SAVED, KILLED)]  # rank 0 may not know of the last step
    assert reason in killed[0] and last == ("completed", SAVED, 10, 0)
    assert numbers(folder) == expected
