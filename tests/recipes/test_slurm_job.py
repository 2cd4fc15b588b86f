"""recipes/launchers/slurm_job.py: after which ends a job is put into the queue again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recipes import record
from recipes.launchers.slurm import SlurmLauncher, script
from recipes.processes import REFUSED, REQUEUE

KILLED, FAILED = 143, 1


@pytest.mark.parametrize(("codes", "requeued"), [
    ([0], [False]),
    ([REQUEUE] * 4, [True] * 4),
    ([REFUSED], [False]),
    ([FAILED, REQUEUE, FAILED, FAILED], [True, True, True, False]),  # it has two restarts
    ([KILLED, KILLED, KILLED], [True, True, False]),  # the limit is shorter than the start
    ([KILLED, KILLED, REQUEUE, KILLED, KILLED], [True] * 5),
])  # fmt: skip
def test_after_which_ends_a_job_is_put_into_the_queue_again(
    tmp_path: Path, codes: list[int], requeued: list[bool]
) -> None:
    programs = {"srun": "exit $CODE", "scontrol": "[ $1 = requeue ] && echo $2 >> requeued || echo n0"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = tmp_path / "job.sh"
    job.write_text(script(SlurmLauncher(devices=2, max_restarts=2), tmp_path / record.CONFIG, 2))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"}
    counts = [0]
    for code in codes:
        done = subprocess.run(["bash", job], cwd=tmp_path, env=variables | {"CODE": str(code)})
        assert done.returncode == code
        log = tmp_path / "requeued"
        counts.append(log.read_text().count("7\n") if log.exists() else 0)
    assert [after > before for before, after in zip(counts, counts[1:], strict=False)] == requeued
