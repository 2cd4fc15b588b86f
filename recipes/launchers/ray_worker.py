"""What one of Ray's workers does: it runs a worker of ours, as a process of its own, and watches over it.

::

    recipes.train -> Ray's controller -> Ray's worker 0 -> python -m recipes.worker CONFIG_FILE
                                      -> Ray's worker 1 -> python -m recipes.worker CONFIG_FILE
                                         ...

So a worker of ours is the same under Ray as elsewhere: it has a main thread, which signals reach, and leaves nothing in
a process that Ray may use again. Ray starts all anew when one of its workers raises an error or dies, and a process
dies with the worker that has started it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import train
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero

from recipes import record
from recipes.launchers.cause import first_failure
from recipes.processes import LAUNCHED, REQUEUE, RESTARTS, how_it_ended

LEAVE = "leave"  # a file in the run's folder: the workers are to save the run, and leave
_LOOKS = 0.5  # seconds between two looks at the process and at that file


def quiet() -> None:
    """In each process of Ray's: without its dashboard a part of it would warn every second that there is none."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Work:
    """What all of Ray's workers are told.

    Attributes:
        config_file: a resolved config.
        nodes: machines.
        devices: of each machine.
        variables: of the environment.
        working_folder: that the config's paths start from.
    """

    config_file: Path
    nodes: int
    devices: int
    variables: Mapping[str, str]
    working_folder: Path


def run(work: Work) -> None:
    """Run one process of a run to its end.

    Raises:
        RuntimeError: it has failed, and may be started again.
    """
    folder, rank = work.config_file.parent, train.get_context().get_world_rank()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "recipes.worker", str(work.config_file)],
        env={**os.environ, **work.variables, **_place(work)},
        cwd=work.working_folder,
    )
    try:
        code = _watch(process, folder / LEAVE)
    finally:
        process.kill()
    left = code in (REQUEUE, -signal.SIGTERM)  # the latter: before it listened
    if code == 0 or (left and (folder / LEAVE).exists()):
        return
    failure = first_failure(folder)
    if failure is None or not failure.is_refusal:  # what was refused would be refused again
        raise RuntimeError(f"rank {rank}: {how_it_ended(code)}")


def _place(work: Work) -> dict[str, str]:
    """The variables that tell the process where it is, and where the others are.

    Raises:
        RuntimeError: Ray hasn't placed the workers as the config says.
    """
    context, folder = train.get_context(), work.config_file.parent
    first = context.get_world_rank() == 0
    if first:
        shutil.rmtree(folder / record.ERRORS, ignore_errors=True)  # of the attempt before
    again = record.read(folder).get("status") != record.STARTING
    if first and again:
        sys.stdout.write("started again, from the newest whole checkpoint\n")
    address, port, restarts = broadcast_from_rank_zero((*_meeting(work.nodes), int(again)) if first else None)
    if context.get_local_world_size() != work.devices:
        there = f"Ray has placed {context.get_local_world_size()} workers on a machine"
        raise RuntimeError(f"cluster.devices={work.devices}, but {there}; use as many as each machine has room for")
    return {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
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


def _watch(process: subprocess.Popen[bytes], leave: Path) -> int:
    """Wait for the end of a process, which is told once to leave if that file appears. Its exit code."""
    told = False
    while True:
        try:
            return process.wait(_LOOKS)
        except subprocess.TimeoutExpired:
            if leave.exists() and not told:
                process.send_signal(signal.SIGTERM)
                told = True


class _AllOfAMachine(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # LOCAL_RANK counts the devices of the machine, not those of a process


class Processes(BackendConfig):  # type: ignore[misc]
    """What Ray sets up for its workers: nothing but the devices that they see."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _AllOfAMachine
