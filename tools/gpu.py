"""``make gpu``, or ``python -m tools.gpu``: what can be seen on this machine's GPUs, by one command.

It runs the tests marked ``gpu``, then the measurements, each in a process of its own, and writes what they say with the
hardware and the versions to ``docs/gpu.json``. The page ``docs/gpu.md`` is filled in from it by hand. Where there is no
GPU that torch can use, nothing is run, and nothing is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes import ROOT
from recipes.tables import circumstances

RESULTS = ROOT / "docs" / "gpu.json"


@dataclass(frozen=True)
class Command:
    """One of the commands that ``make gpu`` runs.

    Attributes:
        limit: seconds after which it is ended.
        arguments: of ``python``, after ``-m``. OUT stands for a folder in which it leaves its tables.
    """

    limit: float
    arguments: Sequence[str]


_ON_GPU = ("--device", "cuda", "--output", "OUT")
COMMANDS: Mapping[str, Command] = {  # their limits are ten minutes together
    "tests": Command(270, ("pytest", "-q", "-m", "gpu", "tests")),
    "tensor": Command(60, ("tools.bench", "tensor", "--only", "alone", *_ON_GPU)),
    "pipeline": Command(150, ("tools.bench", "pipeline", "--only", "one,shared", *_ON_GPU)),
    "late": Command(120, ("tools.bench", "pipeline", "--only", "late", *_ON_GPU)),
}


def main(commands: Mapping[str, Command] = COMMANDS, results: Path = RESULTS) -> None:
    """Run all commands, also after one has failed.

    Raises:
        SystemExit: one has failed.
    """
    if not torch.cuda.is_available():
        print("gpu: not run, since this machine has no GPU that torch can use")
        return
    found: dict[str, Any] = {**circumstances(), "gpus": _gpus()}
    for name, command in commands.items():
        print(f"\n== {name} ==", flush=True)
        found[name] = _run(command)
    results.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nWritten: {results}")
    failed = [name for name in commands if found[name]["exit code"] != 0]
    if failed:
        raise SystemExit(f"gpu: failed: {', '.join(failed)}")


def _run(one: Command) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *(folder if word == "OUT" else word for word in one.arguments)]
        begin = time.monotonic()
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=one.limit, capture_output=True, text=True)
            code, said = ended.returncode, ended.stdout + ended.stderr
        except subprocess.TimeoutExpired as error:
            code, said = 124, _text(error.stdout) + _text(error.stderr)
        print(said, flush=True)
        tables = [
            table for file in sorted(Path(folder).glob("*.json")) for table in json.loads(file.read_text())["tables"]
        ]
    seconds = round(time.monotonic() - begin, 1)
    return {"exit code": code, "seconds": seconds, "tables": tables, "end of output": said.splitlines()[-5:]}


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _gpus() -> list[dict[str, Any]]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": each.name, "GiB": round(each.total_memory / 2**30, 1)} for each in properties]


if __name__ == "__main__":
    main()
