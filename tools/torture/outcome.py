"""What has to hold after a fault: nothing complete is lost, nothing is left, and the run says what happened."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lightning_parallel.checkpoint import read_plain
from recipes import record, resume
from recipes.processes import REQUEUE
from tools.torture.cases import Case
from tools.torture.fault import FAULTY_STEP, LAUNCHER, SAVES_EVERY, Kind, Moment
from tools.torture.program import STEPS

WORDS = {Kind.KILL: "SIGKILL", Kind.ERROR: "InjectedError", Kind.STOP: "stopped"}


@dataclass(slots=True)
class Verdict:
    """What came of a case.

    Attributes:
        problems: what didn't hold, a line each; none if all did.
        ended_in: seconds from the fault until no process was left.
        said: how the run says that it ended.
        resumed_at: the step of the checkpoint that the run went on from; 0 for a fresh start.
        seconds: that the case took.
        times: that the case has come out like this, one after the other.
    """

    problems: list[str] = field(default_factory=list)
    ended_in: float | None = None
    said: str = ""
    resumed_at: int | None = None
    seconds: float = 0.0
    times: int = 1

    @property
    def held(self) -> bool:
        return not self.problems


def run_file(folder: Path) -> dict[str, Any]:
    """What the run says of itself; empty if it hadn't begun to."""
    file = folder / record.RUN
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


def check_words(case: Case, code: int | None, said: Mapping[str, Any]) -> Iterator[str]:
    """The exit code, and what ``run.json`` says.

    Args:
        case: that was run.
        code: exit code of the launcher.
        said: the content of ``run.json``.
    """
    status, error = said.get("status"), said.get("error") or {}
    if case.kind is Kind.TERM:
        if (code, status) != (REQUEUE, "preempted"):
            yield f"exit code {code} and status {status}, not {REQUEUE} and preempted: {error.get('message')}"
    elif case.target == LAUNCHER:  # it can't say anything
        if code != -signal.SIGKILL:
            yield f"exit code {code} of a killed launcher"
    else:
        if (code, status) != (1, "failed"):
            yield f"exit code {code} and status {status}, not 1 and failed"
        message = str(error.get("message"))
        names = error.get("rank") == case.target or f"rank {case.target}" in message
        if not names or WORDS[case.kind] not in message:
            yield f"the cause isn't named: rank {error.get('rank')}: {message}"


def whole_checkpoint(folder: Path) -> tuple[int, dict[str, Tensor]] | None:
    """The step and the weights of the newest checkpoint that is whole, as ``resume=auto`` finds it; None for none."""
    config = yaml.safe_load((folder / record.CONFIG).read_text())
    path = resume.newest(config)
    return opened(Path(path)) if path is not None else None


def opened(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step and the weights of a checkpoint, a directory or a file."""
    content = read_plain(path, weights_only=False)
    return int(content["global_step"]), content["state_dict"]


def least_step(case: Case) -> int:
    """The step of the newest checkpoint that was whole when it happened."""
    if case.moment is Moment.START:
        return 0
    return FAULTY_STEP - SAVES_EVERY if case.moment in (Moment.WRITING, Moment.RENAME) else FAULTY_STEP


def check_nothing_lost(case: Case, folder: Path) -> tuple[int, list[str]]:
    """The step of the newest whole checkpoint, 0 for none, and what is wrong."""
    try:
        found = whole_checkpoint(folder) if (folder / record.CONFIG).exists() else None
    except Exception as error:  # any: whatever can't be opened is lost
        return 0, [f"the newest checkpoint doesn't open: {type(error).__name__}: {error}"]
    step = found[0] if found is not None else 0
    least = least_step(case)
    return step, [f"the newest whole checkpoint is of step {step}, not {least} or later"] if step < least else []


def check_resumed(code: int | None, folder: Path, reference: Path) -> Iterator[str]:
    """A run that has been resumed ends as the one that was never disturbed.

    Args:
        code: its exit code.
        folder: of the run.
        reference: the folder of the undisturbed one.
    """
    said = run_file(folder)
    if (code, said.get("status")) != (0, "completed"):
        message = str((said.get("error") or {}).get("message"))
        yield f"resumed: exit code {code} and status {said.get('status')}: {message}"
        return
    metrics, expected = record.read_metrics(folder), record.read_metrics(reference)
    if said["steps"] != STEPS or metrics != expected:
        yield f"resumed: {metrics} after {said['steps']} steps, not {expected} after {STEPS}"
    yield from _different(opened(folder / "checkpoints" / "last.ckpt"), opened(reference / "checkpoints" / "last.ckpt"))


def _different(found: tuple[int, dict[str, Tensor]], expected: tuple[int, dict[str, Tensor]]) -> Iterator[str]:
    if found[0] != expected[0] or found[1].keys() != expected[1].keys():
        yield f"resumed: the last checkpoint is of step {found[0]}, with {len(found[1])} tensors"
        return
    wrong = [name for name, tensor in expected[1].items() if not torch.equal(found[1][name], tensor)]
    if wrong:
        largest = max((found[1][name].double() - expected[1][name].double()).abs().max().item() for name in wrong)
        yield f"resumed: {len(wrong)} of {len(expected[1])} tensors differ by up to {largest:.1e}, such as {wrong[0]}"
