"""``make gpu``, or ``python -m tools.gpu``: what can be seen on this machine's GPUs, by one command.

It runs the tests marked ``gpu``, then the measurements, each command in a process of its own. After each command it
writes what was found so far to ``docs/gpu.json``, with the hardware and the versions: that stays if the machine is
taken away. The page ``docs/gpu.md`` is filled in from it by hand. Where there is no GPU that torch can use, nothing is
run, and nothing is written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from recipes import ROOT
from recipes.processes import ON_GPUS
from recipes.tables import circumstances
from tools.bench.report import HOW

RESULTS = ROOT / "docs" / "gpu.json"
_STOPPED = 124  # the exit code of a command that reached its limit, as in timeout(1)
_LINES = 100  # the last lines of a command's output that are kept


@dataclass(frozen=True)
class Command:
    """One of the commands that ``make gpu`` runs.

    Attributes:
        limit: seconds after which it is ended.
        arguments: what follows ``python -m``. OUT stands for a folder in which the command leaves its tables, TESTS
            for the files with tests marked ``gpu``.
    """

    limit: float
    arguments: Sequence[str]


_ON_GPU = ("--device", "cuda", "--output", "OUT")
# Their limits add up to ten minutes. What is most in doubt comes first.
COMMANDS: Mapping[str, Command] = {
    "tests": Command(140, ("pytest", "-v", "-p", "no:cacheprovider", "--timeout", "60", "-m", "gpu", "TESTS")),
    "nccl": Command(130, ("tools.bench", "pipeline", "--only", "nccl", *_ON_GPU)),
    "host": Command(100, ("tools.bench", "pipeline", "--only", "host,contention,flight", *_ON_GPU)),
    "pipeline": Command(95, ("tools.bench", "pipeline", "--only", "one,shared", *_ON_GPU)),
    "tensor": Command(45, ("tools.bench", "tensor", "--only", "alone", *_ON_GPU)),
    "late": Command(90, ("tools.bench", "pipeline", "--only", "late", *_ON_GPU)),
}


def main(commands: Mapping[str, Command] = COMMANDS, results: Path = RESULTS) -> None:
    """Run all commands, also after one has failed.

    Raises:
        SystemExit: one has failed.
    """
    if not torch.cuda.is_available():
        print("gpu: not run, since this machine has no GPU that torch can use")
        return
    found: dict[str, Any] = {**circumstances(), "gpus": _gpus(), "nccl": _nccl()}
    runs: dict[str, dict[str, Any]] = {name: {"not run": ["this command hasn't ended"]} for name in commands}
    found["commands"] = runs
    for name, command in commands.items():
        print(f"\n== {name} ==", flush=True)
        runs[name] = _run(command)
        part = results.with_suffix(".part")
        part.write_text(json.dumps(found, indent=2) + "\n")
        part.replace(results)
    print(f"\nWritten: {results}")
    for name, seen in runs.items():
        for said in seen["not run"]:
            print(f"gpu: not run: {name}: {said}")
    failed = [name for name, seen in runs.items() if seen["exit code"] != 0 or seen["failed"]]
    if failed:
        raise SystemExit(f"gpu: failed: {', '.join(failed)}")


def _run(command: Command) -> dict[str, Any]:
    """Run a command. Returns how it ended, its tables and the end of its output."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = [each for word in command.arguments for each in _words(word, folder)]
        begin = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *arguments],
            cwd=ROOT,
            env={**ON_GPUS, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = Thread(target=_pass_on, args=(process, lines), daemon=True)
        reader.start()
        try:
            code = process.wait(command.limit)
        except subprocess.TimeoutExpired:
            code = _STOPPED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers, which may keep the GPU
                process.wait()
        seconds = round(time.monotonic() - begin, 1)
        reader.join(1.0)  # a process that it has left behind may have its output open
        tables = [
            table for file in sorted(Path(folder).glob("*.json")) for table in json.loads(file.read_text())["tables"]
        ]
    ends = [*_ends(tables)]
    not_run = [line.strip() for line in lines if "tests not run: " in line or line.startswith("SKIPPED")]
    not_run += [f"{what}: {how}" for what, how in ends if how.startswith("not run")]
    return {
        "exit code": code,
        "seconds": seconds,
        "not run": not_run + ([f"what came after {command.limit:g} s"] if code == _STOPPED else []),
        "failed": [f"{what}: {how}" for what, how in ends if how.startswith(("hung", "failed"))],
        "tables": tables,
        "end of output": [line.rstrip() for line in lines[-_LINES:]],
    }


def _ends(tables: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Of each row that may fail by itself: what it measures, and how it ended."""
    for table in tables:
        for row in table["rows"]:
            if HOW in row:
                what = takewhile(lambda column: column != HOW, row)
                yield f"{table['title']}: {', '.join(str(row[column]) for column in what)}", row[HOW]


def _words(word: str, folder: str) -> Iterator[str]:
    """What an argument stands for."""
    if word == "TESTS":
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        yield from (str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text())
    else:
        yield folder if word == "OUT" else word


def _pass_on(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)


def _gpus() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": each.name, "GiB": round(each.total_memory / 2**30, 1)} for each in properties]


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


if __name__ == "__main__":
    main()
