"""A run as a TrainJob of Kubeflow's Trainer (v2): a file for ``kubectl``, since clusters have their own ways to it.

The runtime starts torchrun on each machine, with what it has to know in PET_* variables, and the job has the same
command line as here, in the form for torchrun::

    recipes.train cluster=kubernetes cluster.nodes=2 ...    here: check, write trainjob.yaml
    torchrun -m recipes.train cluster=torchrun ...          there, on each machine

Kubernetes starts pods again that have ended with an error or were evicted. ``resume=auto``, and a folder on storage
that all machines share, let them go on. Source of the fields:
https://github.com/kubeflow/trainer/blob/master/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from recipes import record
from recipes.launchers.cluster import Cluster

JOB = "trainjob.yaml"
_VOLUME = "runs"
_CONTAINER = "node"  # what the torch runtimes call their job, and its container
_LONGEST_NAME = 40  # the names of a TrainJob's parts have more in them, of 63 at most


@dataclass(frozen=True, kw_only=True)
class KubernetesLauncher(Cluster):
    """Writes a TrainJob. conf/cluster/kubernetes.yaml says what its settings mean."""

    image: str
    claim: str
    mount: str = "/shared"
    runtime: str = "torch-distributed"
    namespace: str | None = None
    gpus: int | str | None = None
    memory: str | None = None

    def launch(self, config_file: Path, processes: int) -> str:
        """As :meth:`Launcher.launch <recipes.launchers.launcher.Launcher.launch>`, but that it only writes the file."""
        folder = config_file.parent
        said = record.read(folder)
        overrides = said.get("overrides") or []
        foreign = [word for word in overrides if word.lstrip("+~").startswith("hydra.") and "hydra.run.dir" not in word]
        if foreign:
            raise ValueError(f"{foreign[0]}: can't be handed on by cluster=kubernetes; leave it out.")
        if said["configs"] is not None:
            raise ValueError("--config-dir: can't be handed on by cluster=kubernetes; give its values as KEY=VALUE.")
        file = folder / JOB
        run = f"{folder.parent.name}-{folder.name}-{said['config_hash'][:6]}"  # 0, 1, ... in every sweep
        file.write_text(yaml.safe_dump(self.job(run, overrides, processes), sort_keys=False))
        return f"written to {file}; create it with: kubectl create -f {file}"

    def job(self, run: str, overrides: Sequence[str], processes: int) -> dict[str, Any]:
        """The TrainJob of a run with a name. One process needs no more than one machine."""
        name = "run-" + re.sub("[^a-z0-9]+", "-", run.lower())[-_LONGEST_NAME:].strip("-")
        alone = processes == 1
        metadata = {"name": name} | ({"namespace": self.namespace} if self.namespace else {})
        limits = {"nvidia.com/gpu": self.gpus, "memory": self.memory}
        limits = {kind: amount for kind, amount in limits.items() if amount is not None}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {
                "runtimeRef": {"name": self.runtime},
                "trainer": {
                    "image": self.image,
                    "command": ["torchrun", "-m", "recipes.train"],
                    "args": [*self._arguments(overrides), f"hydra.run.dir={PurePosixPath(self.mount) / run}"],
                    "numNodes": 1 if alone else self.nodes,
                    "numProcPerNode": 1 if alone else self.devices,
                    "env": [{"name": "OMP_NUM_THREADS", "value": str(self.threads)}],
                    **({"resourcesPerNode": {"limits": limits}} if limits else {}),
                },
                "runtimePatches": [{"manager": "recipes.train/kubernetes", "trainingRuntimeSpec": self._storage()}],
            },
        }

    def _arguments(self, overrides: Sequence[str]) -> list[str]:
        """The command line for torchrun's processes."""
        own = [word for word in overrides if not word.lstrip("+~").startswith(("cluster", "hydra.run.dir"))]
        common = {name: getattr(self, name) for name in ("nodes", "devices", "timeout", "backend", "interface")}
        told = [f"cluster.{key}={'null' if value is None else value}" for key, value in common.items()]
        resume = [] if any(word.startswith("resume=") for word in own) else ["resume=auto"]
        return [*own, "cluster=torchrun", *told, *resume]

    def _storage(self) -> dict[str, Any]:
        """What the runtime's pods get: the volume of the runs."""
        pod = {
            "volumes": [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": self.claim}}],
            "containers": [{"name": _CONTAINER, "volumeMounts": [{"name": _VOLUME, "mountPath": self.mount}]}],
        }
        job = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
        return {"template": {"spec": {"replicatedJobs": [job]}}}
