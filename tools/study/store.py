"""What is done: a line of JSON for each run, appended when it ends, so that a study can be interrupted anywhere."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from tools.study.arms import Arm, Run, Setting

FILE = "runs.jsonl"


class Store:
    """The runs of a folder, by all that decides their result.

    Attributes:
        results: what :func:`tools.study.train.execute` gave, of each run.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / FILE
        self.results: dict[Run, dict[str, Any]] = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else []:
            try:
                content = json.loads(line)
            except ValueError:  # torn: the machine stopped while it was written
                continue
            arm, setting = Arm(**content["arm"]), Setting(**content["setting"])
            self.results[Run(setting, arm, content["rate"], content["seed"])] = content["result"]

    @property
    def losses(self) -> dict[Run, float]:
        """By which rates are chosen; inf where a run diverged."""
        return {run: _loss(result["choice" if run.setting.choice else "final"]) for run, result in self.results.items()}

    @property
    def finals(self) -> dict[Run, float]:
        """Final validation losses; inf where a run diverged."""
        return {run: _loss(result["final"]) for run, result in self.results.items()}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it no other study writes to the folder: both would do the same runs.

        Raises:
            RuntimeError: another one does already.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with the process, however it ends
            except BlockingIOError:
                raise RuntimeError(f"{self._file} is being written to: end the study that does, or wait") from None
            yield

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Keep a result, on the disk too."""
        self.results[run] = result
        self._file.parent.mkdir(parents=True, exist_ok=True)
        torn = self._file.exists() and not self._file.read_bytes().endswith(b"\n") and self._file.stat().st_size > 0
        with self._file.open("a") as stream:
            stream.write("\n" * torn + json.dumps({**run.key, "result": result}) + "\n")
            stream.flush()


def _loss(kept: float | None) -> float:
    return inf if kept is None else kept
