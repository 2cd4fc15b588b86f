"""recipes/launchers/local.py: of the workers that have ended, the one is named that was first. Whole programs are few,
since each starts processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
from lightning.pytorch.callbacks import Callback
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_parallel.ranks import process_group
from recipes import launch, record
from recipes.launchers import local
from recipes.launchers.launcher import Failure, WorkersFailed
from recipes.launchers.local import Ended, LocalLauncher
from recipes.processes import REQUEUE
from recipes.train import main
from tests.recipes.runs import composed

OWN, LOST = "ValueError: no luck", "PeerLostError: The link to stage 1 broke"
ERROR, KILLED, STOPPED, SLOW, TERMINATED, LEFT = 1, -9, "stopped", "slow", -15, REQUEUE
SLEEPS = "import time; time.sleep(60)"


def ended(folder: Path, *ranks: Any, preempted: bool) -> str:
    """What the launcher says of workers that ended so: with an error, with an exit code, or killed by it."""
    failures, killed = {}, Ended()
    for rank, each in enumerate(ranks):
        end, exited = each if isinstance(each, tuple) else (each, None)
        file = folder / f"{rank}.json"
        if end in (OWN, LOST):
            content = {"message": end, "extraInfo": {"timestamp": "0", "py_callstack": f"Traceback\n{end}"}}
            file.write_text(json.dumps({"message": content}))
        {STOPPED: killed.stopped, SLOW: killed.slow}.get(end, set()).add(rank)
        code = end if isinstance(end, int) else KILLED if end in (STOPPED, SLOW) else ERROR
        code = exited or code
        failures[rank] = ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file=str(file))
    reason = local._reason(ChildFailedError("worker", failures), len(ranks), folder, killed, preempted=preempted)
    return f"rank {reason.failure.rank}: {reason.failure.message}" if isinstance(reason, WorkersFailed) else "preempted"


@pytest.mark.parametrize(("ranks", "preempted", "said"), [
    ([LOST, OWN], False, f"rank 1: {OWN}"),
    ([LOST, KILLED], False, "rank 1: killed by SIGKILL (out of memory?)"),
    ([LOST, STOPPED], False, "rank 1: stopped (SIGSTOP), and did not answer the others"),
    ([SLOW, OWN], False, f"rank 1: {OWN}"),
    ([TERMINATED, OWN], False, f"rank 1: {OWN}"),
    ([LEFT, OWN], False, f"rank 1: {OWN}"),  # the agent's SIGTERM, which it took for a scheduler's
    ([(OWN, -15), OWN], False, f"rank 0: {OWN}"),  # the agent's SIGTERM met it while it left
    ([LEFT, LEFT], False, "preempted"),
    ([LOST, LEFT], False, "preempted"),
    ([LOST, TERMINATED], False, "preempted"),
    # After a signal to the launcher, errors are of those that were left.
    ([OWN, TERMINATED], True, "preempted"),
    ([OWN, OWN], True, f"rank 0: {OWN}"),
], ids=str)  # fmt: skip
def test_the_first_one_is_named(tmp_path: Path, ranks: list[Any], preempted: bool, said: str) -> None:
    assert ended(tmp_path, *ranks, preempted=preempted) == said


@pytest.mark.parametrize(("message", "traceback", "starts"), [
    ("killed by SIGKILL", None, [0, 1, 2]),
    ("ValueError: stages=9", f'  File "{process_group.__file__}", line 1, in x\n', [0]),  # refused: it would be again
])  # fmt: skip
def test_a_failed_run_is_started_again_as_often_as_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, traceback: str | None, starts: list[int]
) -> None:
    started = []

    def fails(self: LocalLauncher, config_file: Path, processes: int, restarts: int) -> None:
        started.append((restarts, record.read(tmp_path)["status"]))
        raise WorkersFailed(Failure(1, message, traceback), processes)

    monkeypatch.setattr(LocalLauncher, "_run", fails)
    (tmp_path / record.RUN).write_text(json.dumps({"status": record.STARTING}))
    with pytest.raises(WorkersFailed, match=message):
        LocalLauncher(devices=2, max_restarts=2).launch(tmp_path / record.CONFIG, 2)
    assert started == [(number, record.STARTING) for number in starts]
    reasons = [each["reason"] for each in record.read(tmp_path).get("attempts", [])]
    assert reasons == [f"rank 1: {message}"] * (len(starts) - 1)  # the last one is recorded by who called it


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks as one of a run's, and is looked at often."""
    monkeypatch.setattr(local, "_LOOKS", 0.05)
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, "recipes.worker"])
    yield process
    process.kill()
    process.wait()


def wait_until(happens: Callable[[], object]) -> None:
    """At most as long as pytest lets a test run."""
    while not happens():
        time.sleep(0.05)


def test_after_an_error_a_stopped_worker_is_killed_at_once(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    with local.watched(tmp_path, patience=3600) as ended:
        time.sleep(0.2)
        assert worker.poll() is None  # so far, it may be continued
        (tmp_path / "error.json").touch()
        wait_until(lambda: worker.poll() is not None)
    assert (worker.poll(), ended) == (-signal.SIGKILL, Ended(stopped={worker.pid}))


def test_others_get_some_seconds_to_end_themselves(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "error.json").touch()
    begin = time.monotonic()
    with local.watched(tmp_path, patience=0.5) as ended:
        wait_until(lambda: worker.poll() is not None)
        assert time.monotonic() - begin > 0.4
    assert (worker.poll(), ended) == (-signal.SIGKILL, Ended(slow={worker.pid}))


TINY = [
    "model=mlp", "data=digits", "model.width=16", "data.batch_size=12",
    "trainer.max_steps=2", "trainer.limit_val_batches=2",
    "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip


class FailsOnRankOne(Callback):
    """Rank 1 raises in its first step; the others wait for it in a collective."""

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise ValueError("no luck today")


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Folder name -> run.json."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.rglob(record.RUN))}


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that name ``folder``."""
    listing = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(folder) in line]


@pytest.mark.programs
def test_a_failing_rank_is_named_and_the_launcher_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "+callbacks.fails._target_=tests.recipes.test_local.FailsOnRankOne"
    config_file = launch.write(composed("strategy=ddp", "callbacks=none", "logger=none", *TINY, fails, folder=tmp_path))
    environment = dict(os.environ)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(WorkersFailed, match="ValueError: no luck today") as raised:
        LocalLauncher(devices=2, threads=1).launch(config_file, processes=2)
    # And rank 0 has ended, which waited in a collective that would end after half an hour.
    assert (raised.value.failure.rank, raised.value.failure.place) == (1, "replica 1 of 2")
    told = str(raised.value)
    assert told.startswith("rank 1 of 2 (replica 1 of 2) failed:") and told.count("no luck today") == 2  # source line
    assert "fit_loop.py" not in told
    errors = {file.name: file.read_text() for file in (tmp_path / record.ERRORS).iterdir()}
    assert errors["rank-1.txt"].count("fit_loop.py") > 0 and set(errors) <= {"rank-0.txt", "rank-1.txt"}
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert list(scratch.iterdir()) == []
    assert processes_of(tmp_path) == []


def test_a_config_with_problems_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "strategy=pipelin", "model=gtp", f"paths.log_dir={tmp_path}/logs"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="(?s)^2 problems .*no such strategy; did you mean pipeline_"):
        main()
    assert list(tmp_path.iterdir()) == []
