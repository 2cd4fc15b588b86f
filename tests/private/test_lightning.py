"""private/lightning/: each private name does what is expected of it. A failure says what a new version breaks.

What to do then: find what replaces the name, in Lightning's changelog or source, and change that one function.
"""

from __future__ import annotations

import signal
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, ProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_parallel import PipelineStrategy
from lightning_parallel.private import lightning as lightning_private
from tests.strategies.harness import make_trainer


def trainer(*callbacks: Callback, **given: Any) -> L.Trainer:
    return make_trainer("single", [*callbacks], {}, **{"max_steps": 2} | given)


META = torch.device("meta")


# -- launching -----------------------------------------------------------------------------------------------


def test_script_launcher_starts_processes_by_script_and_a_refusal_has_the_user_s_own_lines_alone() -> None:
    """Otherwise a message comes after forty frames of this package and of Lightning."""
    launcher = lightning_private.launching.ScriptLauncher(LightningEnvironment(), 3, 2)
    assert (launcher.num_processes, launcher.num_nodes, launcher.is_interactive_compatible) == (3, 2, False)
    launcher = lightning_private.launching.ScriptLauncher(LightningEnvironment(), 1, 1)

    def refused() -> None:
        with torch.no_grad():
            PipelineStrategy(stages=0)

    def wrong() -> None:
        torch.nn.Linear(2, 2)(torch.ones(1, 2).long())

    with pytest.raises(ValueError, match="stages=0") as raised:
        launcher.launch(refused)
    files = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files == ["test_lightning.py", "launching.py", "test_lightning.py", "settings.py"]
    with pytest.raises(RuntimeError) as raised_by_torch:  # an error of another kind has all of its frames
        launcher.launch(wrong)
    assert len(traceback.extract_tb(raised_by_torch.value.__traceback__)) > 5


# -- the strategy's tools ------------------------------------------------------------------------------------


def test_move_optimizers_moves_their_state() -> None:
    """Otherwise an optimizer's state that was loaded on the CPU would meet gradients on a GPU."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    lightning_private.launching.move_optimizers([optimizer], META)
    assert optimizer.state[parameter]["momentum_buffer"].device == META


def test_devices_are_those_that_are_asked_for() -> None:
    """Otherwise ``self.device`` would be the CPU in a fully sharded module, and the first device in every replica; and
    averages would lie on a GPU that has no room for them."""
    for change in (lightning_private.launching.say_device, lightning_private.metrics.set_device):
        module = BoringModel()
        change(module, META)
        assert module.device == META and module.layer.weight.device.type == "cpu"
    plain = torch.nn.Linear(1, 1)
    lightning_private.metrics.set_device(plain, META)
    assert "_device" not in vars(plain)
    device_of_averages = lightning_private.averaging.device_of_averages
    assert device_of_averages(EMAWeightAveraging(device="meta"), torch.device("cpu")) == META
    assert device_of_averages(EMAWeightAveraging(device=None), META) == META


def test_before_batch_transfer_calls_the_users_hook_and_mode_of_is_a_loader_s() -> None:
    class Doubles(BoringModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return 2 * batch

    found: list[Any] = []

    class Looks(SingleDeviceStrategy):
        def setup(self, trainer: L.Trainer) -> None:
            found.append(lightning_private.data.before_batch_transfer(trainer.lightning_module, 3))
            super().setup(trainer)

    trainer(strategy=Looks(torch.device("cpu"))).fit(Doubles())
    assert found == [6]
    assert lightning_private.data.mode_of(CombinedLoader([[1]], "min_size")) == "min_size"


# -- metrics and loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "reads"), [
    ({"every_n_train_steps": 3}, True), ({"every_n_train_steps": 4}, False),
    ({"train_time_interval": timedelta(seconds=1)}, True), ({"every_n_epochs": 1}, False),
])  # fmt: skip
def test_reads_training_metric(given: dict[str, Any], reads: bool) -> None:
    """Otherwise a stage that doesn't have the metric would choose other checkpoints than the last stage."""
    reads_training_metric = lightning_private.metrics.reads_training_metric
    assert reads_training_metric(ModelCheckpoint(monitor="loss", **given), 6) is reads
    assert reads_training_metric(ModelCheckpoint(filename="{epoch}-{loss:.2f}", **given), 6) is reads
    assert reads_training_metric(ModelCheckpoint(filename="{epoch}-{step}", **given), 6) is False


def test_show_in_progress_bar_shows_texts_beside_what_is_logged() -> None:
    """Otherwise the speed, the utilisation and the memory of a run would not be seen while it trains."""
    shown: list[dict[str, Any]] = []

    class Shows(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            lightning_private.metrics.show_in_progress_bar(trainer, {"memory": "1 GiB"})
            assert isinstance(trainer.progress_bar_callback, ProgressBar)
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module))

    trainer(Shows(), enable_progress_bar=True).fit(BoringModel())
    assert all(each["memory"] == "1 GiB" for each in shown) and len(shown) == 2


def test_requeue_by_slurm_saves_and_requeues_at_its_signal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Lightning's automatic requeueing would save inside the handler, wherever the rank happens to be."""
    from lightning.pytorch.trainer.connectors import signal_connector

    called: list[list[str]] = []
    monkeypatch.setattr(signal_connector, "call", lambda command: called.append(command) or 0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    made = trainer(default_root_dir=tmp_path)
    assert not lightning_private.signals.requeue_by_slurm(made, signal.SIGUSR1)
    made._accelerator_connector.cluster_environment = SLURMEnvironment()
    assert not lightning_private.signals.requeue_by_slurm(made, signal.SIGTERM)
    monkeypatch.setattr(made, "save_checkpoint", lambda path: called.append([Path(path).name]))
    assert lightning_private.signals.requeue_by_slurm(made, signal.SIGUSR1)
    assert called == [["hpc_ckpt_1.ckpt"], ["scontrol", "requeue", "7"]]
