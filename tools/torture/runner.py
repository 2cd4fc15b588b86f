"""Runs cases: a run that is disturbed, what is left of it, and the run that goes on from there."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from recipes.launchers.local import workers
from tools.torture.cases import Case
from tools.torture.fault import HAPPENED, LAUNCHER, SAVES_EVERY, Kind, Moment
from tools.torture.layouts import TIMEOUT, Layout
from tools.torture.outcome import Verdict, check_nothing_lost, check_resumed, check_words, run_file
from tools.torture.program import Process, Program, processes, started

BEFORE = 400.0  # seconds that a run may take to get to the fault, and to its end where nothing happens
AFTER = 30.0  # seconds from the fault until nothing is left of it, beyond the timeout if that has to run out

_SAVES_TOO = (  # a second ModelCheckpoint, for layouts whose numbers depend on when they save
    "+callbacks.more={{_target_:lightning.pytorch.callbacks.ModelCheckpoint,every_n_train_steps:{0},"
    "dirpath:${{paths.output_dir}}/more}}"
)


class TortureError(RuntimeError):
    """The case itself didn't work."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs cases in a folder, from several threads if you like.

    Args:
        folder: for the folders of the runs. The undisturbed run of each layout is kept there.
        keep: also those of the cases that held.
        popen: starts a run. Where a signal is for a launcher whose workers import nothing yet, it is not used.
    """

    folder: Path
    keep: bool = False
    popen: Callable[..., Process] = subprocess.Popen
    _over: threading.Event = field(default_factory=threading.Event)
    _references: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """Kill what runs, and start nothing more."""
        self._over.set()
        for process in processes(self.folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def run(self, case: Case) -> Verdict:
        """Run a case.

        Raises:
            TortureError: the undisturbed run failed, or the fault didn't happen.
        """
        begin = time.monotonic()
        folder = self.folder / case.name.replace(", ", "-").replace(" ", "_") / "run"
        shutil.rmtree(folder.parent, ignore_errors=True)
        verdict = self._disturbed(case, folder)
        verdict.resumed_at, problems = check_nothing_lost(case, folder)
        verdict.problems += problems
        reference = self.reference(case.layout, verdict.resumed_at)
        with self._started(folder, case.layout.options) as program:
            code = program.wait(BEFORE)
            verdict.problems += check_resumed(code, folder, reference)
            verdict.problems += [f"resumed: left: {each}" for each in program.left_after(5)]
        if verdict.held and not self.keep:
            shutil.rmtree(folder.parent)
        verdict.seconds = time.monotonic() - begin
        return verdict

    def reference(self, layout: Layout, saved_after: int) -> Path:
        """The folder of the layout's undisturbed run, which is made once.

        Args:
            layout: of the run.
            saved_after: the step after which the disturbed one was saved. If the numbers depend on it, so is this one.
        """
        more = [_SAVES_TOO.format(saved_after)] if layout.drains and saved_after % SAVES_EVERY else []
        name = f"reference {layout.name}" + (f" saved after {saved_after}" if more else "")
        folder = self.folder / name.replace(" ", "_") / "run"
        with self._references:
            if run_file(folder).get("status") != "completed":
                shutil.rmtree(folder.parent, ignore_errors=True)
                with self._started(folder, [*layout.options, *more]) as program:
                    if program.wait(BEFORE) != 0:
                        raise TortureError(f"{layout.name!r} fails undisturbed:\n{program.output}")
        return folder

    @contextmanager
    def _started(
        self, folder: Path, overrides: Sequence[str], popen: Callable[..., Process] | None = None
    ) -> Iterator[Program]:
        if self._over.is_set():
            raise TortureError("it was ended")
        with started(folder, overrides, popen or self.popen) as program:
            yield program

    def _disturbed(self, case: Case, folder: Path) -> Verdict:
        """Run it until nothing of it is left."""
        verdict = Verdict()
        popen = subprocess.Popen if case.is_sent else None
        with self._started(folder, [*case.layout.options, *_fault(case)], popen) as program:
            happened = _send(case, program) if case.is_sent else _wait_for_fault(program)
            limit = AFTER + (TIMEOUT if case.kind is Kind.STOP else 0)
            code = program.wait(happened + limit - time.time())
            if code is None:
                verdict.problems.append(f"not ended {limit:.0f} s after the fault")
            left = program.left_after(5)
            verdict.ended_in = time.time() - happened
            verdict.problems += [f"left: {each}" for each in left]
        said = run_file(folder)
        error = said.get("error") or {}
        verdict.said = f"{said.get('status')}" + (f": rank {error['rank']}: {_line(error['message'])}" if error else "")
        verdict.problems += check_words(case, code, said) if code is not None else []
        return verdict


def _fault(case: Case) -> list[str]:
    """The overrides that bring the fault along."""
    if case.is_sent:
        return []
    node = {"target": case.target, "by": case.by, "kind": case.kind, "moment": f"'{case.moment}'"}
    settings = ",".join(f"{key}:{value}" for key, value in node.items())
    more = ["callbacks.checkpoint.save_top_k=0"] if case.moment is Moment.RENAME else []  # `last` is all there is
    return [f"+callbacks.fault={{_target_:tools.torture.fault.Fault,{settings},folder:${{paths.output_dir}}}}", *more]


def _wait_for_fault(program: Program) -> float:
    """When it happened."""
    file, deadline = program.folder / HAPPENED, time.monotonic() + BEFORE
    while not file.exists():
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise TortureError(f"The fault didn't happen in {program.folder}:\n{program.output}")
        time.sleep(0.05)
    return file.stat().st_mtime


def _send(case: Case, program: Program) -> float:
    """Send the signal to the launcher as soon as it has workers, which import nothing yet."""
    assert case.target == LAUNCHER
    launcher, deadline = psutil.Process(program.process.pid), time.monotonic() + BEFORE
    while not workers(launcher):
        if program.process.poll() is not None or time.monotonic() > deadline:
            raise TortureError(f"No worker was started in {program.folder}:\n{program.output}")
        time.sleep(0.01)
    launcher.send_signal({Kind.KILL: 9, Kind.TERM: 15}[case.kind])
    return time.time()


def _line(message: str) -> str:
    return message.strip().splitlines()[0]
