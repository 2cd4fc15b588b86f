"""recipes/launchers: a cluster of the user's own is one class, which its YAML names; errors cross processes; jobs of
SLURM and of Kubernetes."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from recipes import ROOT, build, record
from recipes.compose import check
from recipes.launchers.kubernetes import JOB, KubernetesLauncher
from recipes.launchers.launcher import Failure, WorkersFailed, first_failure
from recipes.launchers.slurm import SlurmLauncher, script
from recipes.problem import ConfigError
from recipes.processes import REFUSED, REQUEUE
from recipes.train import main
from recipes.validate import validate
from tests.recipes.runs import composed, refused
from tests.recipes.test_local import TINY, runs

MINE = ["cluster._target_=tests.recipes.test_launchers.Imaginary", "+cluster.partition=short"]
LOST = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nx.PeerLostError: The link broke.\n'
OWN = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
ValueError: no luck
  on two lines
"""
KILLED, FAILED = 143, 1


class Imaginary:
    """A cluster that records what it is to start, and says that it has run."""

    def __init__(self, devices: int, partition: str, **settings_of_local: Any) -> None:
        self.devices, self.partition = devices, partition

    def launch(self, config_file: Path, processes: int) -> None:
        folder = config_file.parent
        (folder / "started").write_text(f"{self.partition}: {processes} of {self.devices}")
        record.update(folder, metrics=record.write_metrics(folder, {"val_loss": 0.5}))
        record.end(folder, "completed")


def test_a_cluster_is_added_through_the_one_class_that_its_yaml_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [f"paths.log_dir={tmp_path}/logs", f"paths.data_dir={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["train", "strategy=pipeline_1f1b", *TINY, *folders, *MINE, "cluster.devices=4"])
    monkeypatch.chdir(ROOT)
    main()
    assert (tmp_path / "run" / "started").read_text() == "short: 4 of 4"
    (run,) = runs(tmp_path).values()
    assert run["status"] == "completed" and record.read_metrics(tmp_path / "run") == {"val_loss": 0.5}


@pytest.mark.parametrize("devices", ["0", "two", "null"])
def test_every_cluster_has_devices(devices: str) -> None:
    assert refused(*MINE, f"cluster.devices={devices}").startswith(f"cluster.devices={devices}: ")


def test_an_error_of_workers_comes_back_from_another_process_as_it_was() -> None:
    """Launchers of Hydra's that run jobs in other processes pickle it."""
    error = WorkersFailed(Failure(1, "ValueError: no luck", "Traceback ..."), processes=2)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, WorkersFailed) and str(copy) == str(error)
    assert (copy.failure, copy.processes) == (error.failure, 2)


TRACEBACK = """\
Traceback (most recent call last):
  File "{torch}/optim/sgd.py", line 116, in step
    loss = closure()
           ^^^^^^^^^
  File "/home/me/model.py", line 10, in training_step
    first(x)
  File "{torch}/nn/functional.py", line 5, in linear
    return compute(x)
RuntimeError: wrong
shapes

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "{ours}/collectives.py", line 9, in guarded
    raise
  File "{ours}/collectives.py", line 19, in together
    raise
KeyError: 'x'
"""


def test_the_terminal_shows_the_rank_its_place_and_the_user_s_own_frames() -> None:
    ours, spec = ROOT / "lightning_parallel", find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    traceback = TRACEBACK.replace("{ours}", str(ours)).replace("{torch}", spec.submodule_search_locations[0])
    error = WorkersFailed(Failure(1, "KeyError: 'x'", traceback, "stage 0 of 2"), processes=4)
    text = str(error)
    assert text.startswith("rank 1 of 4 (stage 0 of 2) failed:\nTraceback")
    assert "sgd.py" not in text and "closure()" not in text and "guarded" not in text
    assert all(
        part in text for part in ("me/model.py", "first(x)", "functional.py", "wrong\nshapes", "together", "'x'")
    )
    refused = Failure(0, "ValueError: stages=0", f'File "x"\n  File "{ours}/settings.py", line 3\nV')
    assert str(WorkersFailed(refused, 2)) == "rank 0 of 2 failed:\nValueError: stages=0"


def test_the_parent_process_only_imports_torch_to_check_values() -> None:
    code = "import sys, recipes.train, recipes.compose; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_the_first_error_that_is_a_rank_s_own(tmp_path: Path) -> None:
    for rank, text in enumerate([LOST, LOST, OWN, OWN.replace("no", "other")]):
        assert first_failure(tmp_path) is None or rank == 3  # lost connections alone are no cause
        record.write_error(tmp_path, rank, text)
        os.utime(tmp_path / record.ERRORS / f"rank-{rank}.txt", (rank, rank))
    found = first_failure(tmp_path)
    assert found is not None and (found.rank, found.message) == (2, "ValueError: no luck\n  on two lines")
    assert found.traceback == OWN


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


@pytest.mark.parametrize(("words", "gpus", "cpus"), [
    ([], "4", "1"),
    (["data.workers=7", "cluster.threads=2"], "4", "9"),
    (["trainer.accelerator=cpu"], None, "1"),
    (["cluster.gpus=a100:4", "cluster.cpus=12"], "a100:4", "12"),
    (["cluster.gpus=null"], None, "1"),
    (["strategy=single"], "1", "1"),
])  # fmt: skip
def test_a_job_of_slurm_asks_for_what_its_processes_need(words: list[str], gpus: str | None, cpus: str) -> None:
    config = composed("cluster=slurm", "cluster.devices=4", "launch=false", *words)
    assert [problem for problem in validate(config) if "gpus" in str(problem) or "cpus" in str(problem)] == []
    job = script(cast(SlurmLauncher, build.launcher(config)), Path("run") / record.CONFIG, 8)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", job, re.MULTILINE))
    assert (asked.get("gpus-per-node"), asked["cpus-per-task"]) == (gpus, cpus)
    assert f"srun --cpus-per-task={cpus} " in job


def test_a_job_of_slurm_runs_its_workers_in_a_container() -> None:
    words = ["cluster.container='me/train:1 x'", "cluster.mounts=[/data:/data,/x:/y:ro]", "launch=false"]
    config = composed("cluster=slurm", *words)
    assert validate(config) == []
    job = script(cast(SlurmLauncher, build.launcher(config)), Path("/runs/one") / record.CONFIG, 2)
    (line,) = re.findall(r"^srun .*$", job, re.MULTILINE)
    given = shlex.split(line.removesuffix("bash -c '"))
    here = Path.cwd()
    mounts = dict.fromkeys([f"{here}:{here}", "/runs/one:/runs/one", f"{ROOT}:{ROOT}", "/data:/data", "/x:/y:ro"])
    assert {"--container-image=me/train:1 x", f"--container-workdir={here}"} <= {*given}
    assert f"--container-mounts={','.join(mounts)}" in given
    (kept,) = (each for each in given if each.startswith("--container-env="))  # the image may have some of its own
    assert kept.endswith("PYTHONPATH,MASTER_ADDR,MASTER_PORT")
    assert "' python3 /runs/one/" in job  # the image's own
    assert sys.executable in (outside := script(SlurmLauncher(devices=2), Path("/runs/one") / record.CONFIG, 2))
    assert "--container" not in outside


@pytest.mark.parametrize(("mount", "folder"), [
    (None, Path.cwd()), ("/data:/data", Path("/data")), ("/data", Path("/data")),
    ("/data:/x", None), ("/data:/data:ro", None),
])  # fmt: skip
def test_a_folder_inside_a_mount_of_a_container_may_have_any_name(mount: str | None, folder: Path | None) -> None:
    mounts = [] if mount is None else [mount]
    cluster = SlurmLauncher(devices=2, container="an/image", mounts=mounts)
    run = (folder or Path("/data")) / "lr=0.1,seed=2"
    with nullcontext() if folder else pytest.raises(ConfigError, match="hydra.run.dir=/data/lr=0.1,seed=2"):
        job = script(cluster, run / record.CONFIG, 2)
        given = re.findall(r"--container-mounts=(\S+)", job)
        assert given == [",".join([f"{place}:{place}" for place in dict.fromkeys([Path.cwd(), ROOT])] + mounts)]


NEEDED = ["cluster=kubernetes", "cluster.image=me/image:1", "cluster.claim=runs"]
LINE = [*NEEDED, "cluster.nodes=2", "cluster.devices=4", "cluster.gpus=4"]
LINE += ["cluster.memory=64Gi", "cluster.interface=eth0"]
MORE = ["strategy=pipeline_3d", "+trainer.min_steps=3", "hydra.run.dir=somewhere"]


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
    job = written(folder, *LINE, *MORE)
    spec, trainer = job["spec"], job["spec"]["trainer"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    run = f"{tmp_path.name}-2026-11-23_Run-{record.read(folder)['config_hash'][:6]}"
    assert job["metadata"]["name"].startswith("run-") and len(job["metadata"]["name"]) <= 44
    # Of the published schema, the fields that are used here.
    assert job["metadata"].keys() <= {"name", "namespace"}
    assert spec.keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert trainer == {
        "image": "me/image:1", "numNodes": 2, "numProcPerNode": 4, "command": ["torchrun", "-m", "recipes.train"],
        "args": [
            *MORE[:2], "cluster=torchrun", "cluster.nodes=2", "cluster.devices=4", "cluster.timeout=1800",
            "cluster.backend=null", "cluster.interface=eth0", "resume=auto", f"hydra.run.dir=/shared/{run}",
        ],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}},
    }  # fmt: skip
    assert check([*trainer["args"], "launch=false"]) == []
    (patch,) = spec["runtimePatches"]  # the runs are on the claim
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"} and job["name"] == container["name"] == "node"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]


def test_hydra_s_own_settings_cannot_be_handed_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hydra.searchpath=.*: can't be handed on by cluster=kubernetes"):
        written(tmp_path, *LINE, "hydra.searchpath=[file:///mine]")
