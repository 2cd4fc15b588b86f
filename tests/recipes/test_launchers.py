"""recipes/launchers: a cluster of the user's own is one class, which its YAML names; errors cross processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipes import ROOT, build, record
from recipes.launchers.launcher import Failure, Launcher, WorkersFailed
from recipes.launchers.local import LocalLauncher
from recipes.train import main
from recipes.validate import validate
from tests.recipes.test_configs import composed
from tests.recipes.test_launch import TINY, runs

MINE = "tests.recipes.test_launchers.Imaginary"


class Imaginary:
    """A cluster that records what it is to start, and says that it has run."""

    def __init__(self, devices: int, partition: str, **settings_of_local: Any) -> None:
        self.devices, self.partition = devices, partition

    def launch(self, config_file: Path, processes: int) -> None:
        if self.partition == "full":
            raise WorkersFailed(Failure(0, "no machine is free", None), processes)
        folder = config_file.parent
        (folder / "started").write_text(f"{self.partition}: {processes} of {self.devices}")
        record.write_metrics(folder, {"val_loss": 0.5})
        record.end(folder, "completed")


def cluster(partition: str = "short") -> list[str]:
    return [f"cluster._target_={MINE}", f"+cluster.partition={partition}", "cluster.devices=4"]


def test_a_cluster_is_added_through_the_one_class_that_its_yaml_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [f"paths.log_dir={tmp_path}/logs", f"paths.data_dir={tmp_path}/data", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["train", "strategy=pipeline_1f1b", *TINY, *folders, *cluster()])
    monkeypatch.chdir(ROOT)
    main()
    assert (tmp_path / "run" / "started").read_text() == "short: 4 of 4"
    (run,) = runs(tmp_path).values()
    assert run["status"] == "completed" and record.read_metrics(tmp_path / "run") == {"val_loss": 0.5}


def test_launchers_are_made_from_the_node_of_the_cluster() -> None:
    config = composed(*cluster())
    assert validate(config) == []
    mine: Launcher = build.launcher(config)
    assert isinstance(mine, Imaginary) and mine.partition == "short"
    local: Any = build.launcher(composed("cluster.devices=3", "cluster.threads=2"))
    assert isinstance(local, LocalLauncher) and (local.devices, local.threads) == (3, 2)


@pytest.mark.parametrize("devices", ["0", "two", "null"])
def test_every_cluster_has_devices(devices: str) -> None:
    (problem,) = validate(composed(*cluster()[:-1], f"cluster.devices={devices}"))
    assert str(problem).startswith(f"cluster.devices={devices}: ")


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
