"""recipes/launchers/kubernetes.py: a TrainJob that runs the same command line under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import build, record
from recipes.compose import check
from recipes.launchers.kubernetes import JOB, KubernetesLauncher
from tests.recipes.runs import composed, problems

NEEDED = ["cluster=kubernetes", "cluster.image=me/image:1", "cluster.claim=runs"]
LINE = [*NEEDED, "cluster.nodes=2", "cluster.devices=4", "cluster.gpus=4"]
LINE += ["cluster.memory=64Gi", "cluster.interface=eth0"]
OWN = ["strategy=pipeline_3d", "+trainer.min_steps=3", "hydra.run.dir=somewhere"]
# Of the published schema, the fields that are used here.
FIELDS = {
    "metadata": {"name", "namespace"},
    "spec": {"runtimeRef", "trainer", "runtimePatches"},
    "trainer": {"image", "command", "args", "numNodes", "numProcPerNode", "env", "resourcesPerNode"},
}


def written(folder: Path, *overrides: str) -> dict[str, Any]:
    """The file that the launcher leaves in the folder of a run."""
    config = composed(*overrides, folder=folder)
    record.start(folder, config, {}, overrides)
    launcher = build.launcher(config)
    assert isinstance(launcher, KubernetesLauncher)
    assert f"kubectl create -f {folder / JOB}" in launcher.launch(folder / record.CONFIG, 8)
    return yaml.safe_load((folder / JOB).read_text())  # type: ignore[no-any-return]


def test_the_job_is_the_command_line_for_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "2026-11-23_Run"
    folder.mkdir()
    job = written(folder, *LINE, *OWN)
    spec, trainer = job["spec"], job["spec"]["trainer"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    run = f"{tmp_path.name}-2026-11-23_Run-{record.read(folder)['config_hash'][:6]}"
    assert job["metadata"]["name"].startswith("run-") and len(job["metadata"]["name"]) <= 44
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("me/image:1", 2, 4)
    assert trainer["command"] == ["torchrun", "-m", "recipes.train"]
    assert trainer["args"] == [
        *OWN[:2], "cluster=torchrun", "cluster.nodes=2", "cluster.devices=4", "cluster.timeout=1800",
        "cluster.backend=null", "cluster.interface=eth0", "resume=auto", f"hydra.run.dir=/shared/{run}",
    ]  # fmt: skip
    assert check([*trainer["args"], "launch=false"]) == []
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}}
    assert trainer["env"] == [{"name": "OMP_NUM_THREADS", "value": "1"}]
    for name, fields in FIELDS.items():
        node = {"metadata": job["metadata"], "spec": spec, "trainer": trainer}[name]
        assert node.keys() <= fields
    (patch,) = spec["runtimePatches"]  # the runs are on the claim
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"} and job["name"] == container["name"] == "node"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]


@pytest.mark.parametrize("key", ["image", "claim"])
def test_what_only_the_user_knows_is_asked_for(key: str) -> None:
    (problem,) = problems(*NEEDED, f"cluster.{key}=null")
    assert str(problem) == f"cluster.{key}=null: not a value it can have; give a string"


def test_hydra_s_own_settings_cannot_be_handed_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hydra.searchpath=.*: can't be handed on by cluster=kubernetes"):
        written(tmp_path, *LINE, "hydra.searchpath=[file:///mine]")
