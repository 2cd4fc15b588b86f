"""Workers that are there already: torchrun, MPI or a cloud's launcher has started this program once for each device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.handover import hand_on
from recipes.launchers.cluster import Cluster
from recipes.worker import start


@dataclass(frozen=True, kw_only=True)
class TorchrunLauncher(Cluster):
    """Makes a worker of this process, which torchrun or something like it has started, one of several.

    It starts nothing, so ``max_restarts`` and ``threads`` are torchrun's: ``--max-restarts`` and ``OMP_NUM_THREADS``.
    """

    def launch(self, config_file: Path, processes: int) -> None:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`, but that this process is worker 0,
        which a scheduler's signal ends with :data:`~recipes.processes.REQUEUE`."""
        start(hand_on(config_file.read_text()))
