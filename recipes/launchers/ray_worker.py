"""What one of Ray's workers does: it runs the processes of a machine, and watches over them.

::

    recipes.train -> Ray's controller -> Ray's worker, machine 0 -> python -m recipes.worker CONFIG_FILE   rank 0
                                                                 -> python -m recipes.worker CONFIG_FILE   rank 1
                                      -> Ray's worker, machine 1 -> python -m recipes.worker CONFIG_FILE   rank 2
                                         ...

So a process of a run is the same under Ray as elsewhere: it has a main thread, which signals reach, and leaves nothing
in a process that Ray may use again. Ray starts all anew when one of its workers raises an error or dies, and what that
has started dies with it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero

from recipes import record
from recipes.launchers.launcher import first_failure
from recipes.processes import LAUNCHED, REQUEUE, RESTARTS, WORKER, how_it_ended

# Files in the run's folder: the workers are to save the run, and leave; one has told its processes so.
LEAVE, LEAVING = "leave", "leaving"
_LOOKS = 0.5  # seconds between two looks at the processes and at that file
_PATIENCE = 10.0  # seconds that the others get to end themselves when one has failed


def quiet() -> None:
    """In each process of Ray's: without its dashboard a part of it would warn every second that there is none."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Work:
    """What all of Ray's workers are told.

    Attributes:
        config_file: a resolved config.
        nodes: machines.
        processes: on each.
        variables: of their environment.
        working_folder: that the config's paths start from.
    """

    config_file: Path
    nodes: int
    processes: int
    variables: Mapping[str, str]
    working_folder: Path


def run(work: Work) -> None:
    """Run this machine's processes to their end. RuntimeError: one has failed, and all may be started again."""
    folder = work.config_file.parent
    command = [sys.executable, *WORKER, str(work.config_file)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **work.variables, **place}, cwd=work.working_folder)
        for place in _places(work)
    ]
    try:
        failed = _watch(processes, folder)
    finally:
        for process in processes:
            process.kill()
    if failed is None:
        return
    failure = first_failure(folder)
    if failure is None or not failure.is_refusal:  # what was refused would be refused again
        rank = train.get_context().get_world_rank() * work.processes + processes.index(failed)
        raise RuntimeError(f"rank {rank}: {how_it_ended(failed.returncode)}")


def _places(work: Work) -> Iterator[dict[str, str]]:
    """The variables that tell each process where it is, and where the others are."""
    machine, folder = train.get_context().get_world_rank(), work.config_file.parent
    first = machine == 0
    if first:
        shutil.rmtree(folder / record.ERRORS, ignore_errors=True)  # of the attempt before
    again = record.read(folder).get("status") != record.STARTING
    if first and again:
        sys.stdout.write("started again, from the newest whole checkpoint\n")
    address, port, restarts = broadcast_from_rank_zero((*_meeting(work.nodes), int(again)) if first else None)
    for local in range(work.processes):
        yield {
            "RANK": str(machine * work.processes + local),
            "WORLD_SIZE": str(work.nodes * work.processes),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(work.processes),
            "GROUP_RANK": str(machine),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            LAUNCHED: str(os.getpid()),
            RESTARTS: str(restarts),
        }


def _meeting(nodes: int) -> tuple[str, int]:
    """An address of this machine by which the others reach it, and a port that nobody has at the moment."""
    address = "127.0.0.1" if nodes == 1 else ray.util.get_node_ip_address()
    with socket.socket() as held:
        held.bind((address, 0))
        return address, held.getsockname()[1]


def _watch(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> subprocess.Popen[bytes] | None:
    """Wait until all processes have ended. If the file ``leave`` appears, tell them once to leave. Returns the process
    that failed: one that was killed, or else the first. None where all are done, or have left."""
    told, until = False, None
    failed: list[subprocess.Popen[bytes]] = []
    while any(process.poll() is None for process in processes):
        if (folder / LEAVE).exists() and not told:
            told = True
            (folder / LEAVING).touch()
            for process in processes:
                process.send_signal(signal.SIGTERM)
        failed += [each for each in processes if each not in failed and _has_failed(each, told)]
        if until is None and (failed or _is_refused(folder)):
            until = time.monotonic() + _PATIENCE
        if until is not None and time.monotonic() > until:
            break
        time.sleep(_LOOKS)
    told = told or (folder / LEAVE).exists()
    failed = [each for each in (*failed, *processes) if _has_failed(each, told)]
    return next((each for each in failed if each.returncode < 0), failed[0] if failed else None)


def _is_refused(folder: Path) -> bool:
    """Has a rank been refused, perhaps on another machine? Ray wouldn't tell: nothing is to be started again."""
    failure = first_failure(folder)
    return failure is not None and failure.is_refusal


def _has_failed(process: subprocess.Popen[bytes], told: bool) -> bool:
    """Has it ended in a way it should not have? -SIGTERM is right: it was told to leave before it listened."""
    code = process.poll()
    return code is not None and code != 0 and not (told and code in (REQUEUE, -signal.SIGTERM))
