"""private/lightning/: each private name does what is expected of it. A failure says what a new version breaks.

What to do then: find what replaces the name, in Lightning's changelog or source, and change that one function.
"""

from __future__ import annotations

import ast
import inspect
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.core import saving
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.private import lightning as lightning_private
from tests.test_house import is_private, modules


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(*callbacks: Callback, **given: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**({"accelerator": "cpu", "max_steps": 2, "callbacks": list(callbacks)} | quiet | given))


# What tests of strategies would miss at once, each with their file.
ELSEWHERE = {
    "LoaderSource": "loading/test_first_batch.py",
    "take_back_loaders": "loading/test_first_batch.py",
    "samples_predicted": "results/test_predictions.py",
    "step_metrics": "strategies/test_host_reads.py",
    "time_without_broadcasts": "strategies/test_late_values.py",
}


def test_every_function_is_used_and_pinned() -> None:
    here, private = Path(__file__), Path(lightning_private.__file__).parent
    assert all((here.parents[1] / file).exists() for file in ELSEWHERE.values())
    others = [file.read_text() for file in modules(private.parents[1]) if file.parent != private]
    own = [node for file in modules(private) for node in ast.parse(file.read_text()).body]
    for name in [node.name for node in own if isinstance(node, ast.FunctionDef) and not is_private(node.name)]:
        assert any(name in text for text in others), f"{name} is not used"
        assert name in here.read_text().replace("def test_", ""), f"{name} is not pinned"


# -- launching -----------------------------------------------------------------------------------------------


def test_launched_by_make_launcher_is_called_once_while_a_trainer_is_made() -> None:
    """Otherwise no process would be launched, and nothing refused before training."""
    calls: list[str] = []

    @lightning_private.launching.launched_by_make_launcher
    class Spy(SingleDeviceStrategy):
        def make_launcher(self) -> None:
            calls.append(type(lightning_private.launching.layer_sync_of(self)).__name__)

    trainer(strategy=Spy(torch.device("cpu")), sync_batchnorm=True)
    assert calls == ["TorchSyncBatchNorm"]
    assert lightning_private.launching.layer_sync_of(SingleDeviceStrategy()) is None


def test_script_launcher_starts_processes_by_script() -> None:
    """Otherwise a user's script would not be started for each device."""
    launcher = lightning_private.launching.ScriptLauncher(LightningEnvironment(), 3, 2)
    assert (launcher.num_processes, launcher.num_nodes, launcher.is_interactive_compatible) == (3, 2, False)


def test_asked_weights_only_is_what_the_call_was_given() -> None:
    """Otherwise a checkpoint with more than plain values could not be resumed from: Lightning drops the argument."""
    strategy = SingleDeviceStrategy()
    strategy._launcher = lightning_private.launching.ScriptLauncher(LightningEnvironment(), 1, 1)  # type: ignore[assignment]
    assert lightning_private.launching.asked_weights_only(strategy) is None
    run = trainer(strategy=strategy)
    for method in (run._fit_impl, run._validate_impl, run._test_impl, run._predict_impl):
        assert "weights_only" in inspect.signature(method).parameters
    run.fit(Net(), DataLoader(torch.ones(4, 1)), weights_only=False)
    assert lightning_private.launching.asked_weights_only(strategy) is False


def test_init_process_group_takes_what_it_is_given() -> None:
    from lightning.fabric.utilities import distributed

    taken = list(inspect.signature(distributed._init_dist_connection).parameters)
    assert taken == ["cluster_environment", "torch_distributed_backend", "global_rank", "world_size", "kwargs"]
    assert "init_process_group" in inspect.getsource(distributed._init_dist_connection)
    assert "init_process_group" in inspect.getsource(lightning_private.launching.init_process_group)


# -- the strategy's tools ------------------------------------------------------------------------------------


def test_move_optimizers_moves_their_state() -> None:
    """Otherwise an optimizer's state that was loaded on the CPU would meet gradients on a GPU."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    lightning_private.launching.move_optimizers([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].device.type == "meta"


def test_say_device_changes_what_a_module_says_and_moves_nothing() -> None:
    """Otherwise ``self.device`` would be the CPU in a fully sharded module."""
    module = Net()
    lightning_private.launching.say_device(module, torch.device("meta"))
    assert module.device.type == "meta"
    assert module.layer.weight.device.type == "cpu"


def test_callbacks_of_a_trainer_are_the_list_that_it_calls() -> None:
    """Otherwise the last stage's values would not reach other stages' callbacks."""
    called: list[str] = []

    class Added(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            called.append("added")

    made = trainer(max_steps=1)
    lightning_private.launching.callbacks_of(made).insert(0, Added())
    made.fit(Net(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert called == ["added"]


# -- data ----------------------------------------------------------------------------------------------------


def test_mode_of_a_combined_loader() -> None:
    assert lightning_private.data.mode_of(CombinedLoader([[1]], "min_size")) == "min_size"


def test_before_batch_transfer_calls_the_users_hook() -> None:
    class Doubles(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return 2 * batch

    found: list[Any] = []

    class Looks(SingleDeviceStrategy):
        def setup(self, trainer: L.Trainer) -> None:
            found.append(lightning_private.data.before_batch_transfer(trainer.lightning_module, 3))
            super().setup(trainer)

    trainer(strategy=Looks(torch.device("cpu"))).fit(Doubles(), DataLoader(torch.ones(1, 1)))
    assert found == [6]


# -- metrics and loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        ({"every_n_train_steps": 3}, True),
        ({"every_n_train_steps": 4}, False),
        ({"train_time_interval": timedelta(seconds=1)}, True),
        ({"every_n_epochs": 1}, False),
    ],
)
def test_reads_training_metric(given: dict[str, Any], reads: bool) -> None:
    """Otherwise a stage that doesn't have the metric would choose other checkpoints than the last stage."""
    assert lightning_private.metrics.reads_training_metric(ModelCheckpoint(monitor="loss", **given), 6) is reads
    named = ModelCheckpoint(filename="{epoch}-{loss:.2f}", **given)
    assert lightning_private.metrics.reads_training_metric(named, 6) is reads
    assert (
        lightning_private.metrics.reads_training_metric(ModelCheckpoint(filename="{epoch}-{step}", **given), 6) is False
    )


def test_replace_metric_places_replaces_what_the_trainer_shows() -> None:
    """Otherwise stages that don't have a step's metrics yet would show old ones."""

    class Places(dict[str, Any]):
        pass

    run = trainer()
    lightning_private.metrics.replace_metric_places(run, Places)
    shown = (run.callback_metrics, run.logged_metrics, run.progress_bar_metrics)
    for place, metrics in zip(lightning_private.metrics.metric_places(run), shown, strict=True):
        assert isinstance(place, Places) and metrics is place


def test_show_in_progress_bar_shows_texts_beside_what_is_logged() -> None:
    """Otherwise the speed, the utilisation and the memory of a run would not be seen while it trains."""
    shown: list[dict[str, Any]] = []

    class Shows(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            lightning_private.metrics.show_in_progress_bar(trainer, {"memory": "1 GiB"})
            assert isinstance(trainer.progress_bar_callback, ProgressBar)
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module))

    trainer(Shows(), enable_progress_bar=True).fit(Net(), DataLoader(torch.ones(2, 1)))
    assert all(each["memory"] == "1 GiB" for each in shown) and len(shown) == 2


def test_logged_step_is_that_of_what_the_batch_logs() -> None:
    """Otherwise the figures of a run would stand beside other batches' losses."""
    steps: list[int] = []
    logged: list[int | None] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            steps.append(lightning_private.metrics.logged_step(trainer))

    class Keeps(DummyLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "loss" in metrics:
                logged.append(step)

    trainer(Looks(), max_steps=4, logger=Keeps(), log_every_n_steps=1).fit(Net(), DataLoader(torch.ones(2, 1)))
    assert steps == logged == [0, 1, 2, 3]


def test_evaluation_outputs_and_metrics_of_no_loader_become_what_validate_returns() -> None:
    """Otherwise ``trainer.validate()`` would return nothing on stages but the last."""
    found: list[Any] = []

    class Looks(Callback):
        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.log("end", 2.0)
            found.append([*lightning_private.metrics.evaluation_outputs(trainer)])
            found.append({**lightning_private.metrics.metrics_of_no_loader(trainer)})

    returned = trainer(Looks()).validate(Net(), torch.utils.data.DataLoader(torch.ones(2, 1)), verbose=False)
    outputs, of_no_loader = found
    assert [{**output, **of_no_loader} for output in outputs] == returned
    assert {"val", "end"} == set(returned[0])
    assert lightning_private.metrics.metrics_of_no_loader(trainer()) == {}


def test_before_each_batch_calls_between_batches_and_no_batch_waits_for_rank_0() -> None:
    """Otherwise a signal wouldn't end a run; and no stage could start a batch before the last one does."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    assert "torch.distributed.broadcast" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert inspect.getsource(_TrainingEpochLoop).count("distributed.broadcast") == 1
    seen: list[int] = []

    class Hooks(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.end = lightning_private.batches.before_each_batch(trainer, lambda: seen.append(0))

        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(2)

        def on_validation_end(self, *args: Any) -> None:
            seen.append(3)

    hooks = Hooks()
    made = trainer(hooks, limit_train_batches=2, val_check_interval=1, num_sanity_val_steps=0)
    before = dict(vars(made.fit_loop.epoch_loop))
    made.fit(Net(), *2 * [torch.utils.data.DataLoader(torch.ones(2, 1))])
    assert seen == [0, 2, 3, 0, 2, 3]
    hooks.end()
    assert vars(made.fit_loop.epoch_loop).keys() == before.keys()


def test_take_signals_gets_them_in_the_place_of_lightning_s_handler() -> None:
    """Otherwise a rank that gets SIGTERM makes a collective alone, and hangs."""
    got: list[int] = []

    class Raises(Callback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            lightning_private.signals.take_signals(
                trainer, [signal.SIGTERM, signal.SIGUSR1], lambda number, frame: got.append(number)
            )

        def on_train_batch_start(self, *args: Any) -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)

    numbers = signal.SIGTERM, signal.SIGUSR1
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    made = trainer(Raises(), max_steps=1)
    made.fit(Net(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    after = [signal.signal(number, handler) for number, handler in zip(numbers, before, strict=True)]
    assert got == [signal.SIGTERM, signal.SIGUSR1] and after == [signal.SIG_DFL, signal.SIG_DFL]
    assert not made.received_sigterm
    lightning_private.signals.say_terminated(made)
    assert made.received_sigterm


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


def test_save_last_saves_whatever_the_triggers_say(tmp_path: Path) -> None:
    """Otherwise a signal would save nothing where ``save_last`` isn't set."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_top_k=0)
    made = trainer(checkpoint, enable_checkpointing=True, limit_train_batches=3)
    made.fit(Net(), torch.utils.data.DataLoader(torch.ones(3, 1)))
    assert os.listdir(tmp_path) == []
    assert lightning_private.checkpoints.save_last(checkpoint, made) == str(tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"] and checkpoint.save_last is None


@pytest.mark.parametrize("validated", [False, True])
def test_continue_epoch_validates_after_the_last_step_if_that_is_due(tmp_path: Path, validated: bool) -> None:
    """Otherwise a run that was saved in its last step leaves its validation out, and ends at once."""
    seen: list[Any] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    class Resumes(Callback):
        def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
            batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for counters in (batches["total"], batches["current"]):
                counters["completed"] += 1
            begin = partial(seen.append, "begin")
            lightning_private.batches.continue_epoch(
                trainer, begin, finish=True, validated=validated, should_stop=False
            )

        def on_train_batch_start(self, *_: Any) -> None:
            seen.append("batch")

        def on_validation_end(self, *_: Any) -> None:
            seen.append("validation")

        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(trainer.max_steps)

    loader, options = torch.utils.data.DataLoader(torch.ones(4, 1)), {"max_steps": 2, "val_check_interval": 2}
    trainer(Saves(), **options).fit(Net(), loader, loader)
    made = trainer(Resumes(), num_sanity_val_steps=0, **options)
    before = set(vars(made.fit_loop.epoch_loop)), set(vars(made.fit_loop))
    made.fit(Net(), loader, loader, ckpt_path=tmp_path / "end.ckpt")
    assert seen == (["begin", 2] if validated else ["begin", "validation", 2])
    assert (set(vars(made.fit_loop.epoch_loop)), set(vars(made.fit_loop))) == before
    assert made.fit_loop.epoch_loop._batches_that_stepped == 2


def test_continue_epoch_ends_where_the_run_does_not_come_to_it() -> None:
    """Otherwise what a failed run hasn't come to would happen in the Trainer's next one."""
    made = trainer()
    before = set(vars(made.fit_loop.epoch_loop)), set(vars(made.fit_loop))
    end = lightning_private.batches.continue_epoch(made, lambda: None, finish=True, validated=False, should_stop=False)
    end()
    end()
    assert (set(vars(made.fit_loop.epoch_loop)), set(vars(made.fit_loop))) == before


def test_validation_has_ended_in_the_hooks_after_it() -> None:
    """Otherwise a resumed run would validate once more, or leave a validation out."""
    seen: list[tuple[str, bool]] = []

    class Looks(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_validation") and name != "on_validation_model_zero_grad":
                return lambda trainer, *_, **__: seen.append(
                    (name, lightning_private.batches.validation_has_ended(trainer))
                )
            return super().__getattribute__(name)

    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    for loaders in (loader, [loader, loader]):
        seen.clear()
        made = trainer(Looks(), num_sanity_val_steps=0, val_check_interval=1)
        made.fit(TwoLoaders() if isinstance(loaders, list) else Net(), loader, loaders)
        assert {name for name, ended in seen if ended} == {"on_validation_end"}
        assert sum(ended for _, ended in seen) == 2 and ("on_validation_end", False) not in seen


class TwoLoaders(Net):
    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx)


def test_around_step_hooks_begins_with_complete_gradients_and_ends_before_the_optimizer() -> None:
    """Otherwise a norm that a hook takes of a part of the model would clip without a word."""
    seen: list[str] = []

    class Hooks(Net):
        def on_after_backward(self) -> None:
            seen.append("backward")

        def on_before_optimizer_step(self, *_: Any) -> None:
            seen.append("hook")

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            seen.append("clip")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            class Optimizer(torch.optim.SGD):
                def step(self, closure: Any = None) -> Any:
                    closure()
                    seen.append("step")

            return Optimizer(self.parameters(), lr=0.1)

    made = trainer(max_steps=1)
    put_back = lightning_private.batches.around_step_hooks(
        made.precision_plugin, lambda: seen.append("begin"), lambda: seen.append("end")
    )
    made.fit(Hooks(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert seen == ["backward", "begin", "hook", "clip", "end", "step"]
    put_back()
    assert "_after_closure" not in vars(made.precision_plugin)


def test_continue_after_epoch_steps_plateau_schedulers_of_that_epoch(tmp_path: Path) -> None:
    """Otherwise the run that goes on after it has a step less: Lightning saves before."""
    metrics: list[float] = []

    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            step = plateau.step
            plateau.step = lambda metric: (metrics.append(float(metric)), step(metric))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "it", "frequency": 2}}

    class Finishes(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.callback_metrics["it"] = torch.tensor(7.0)
            if trainer.current_epoch == 1:
                trainer.fit_loop.epoch_progress.current.completed += 1  # as it is loaded
                lightning_private.batches.continue_after_epoch(trainer, lambda: None, stepped=False)()
                trainer.fit_loop.epoch_progress.current.completed -= 1

    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    trainer(Finishes(), max_steps=-1, max_epochs=2).fit(Plateau(), loader)
    assert metrics == [7.0, 7.0]  # the one of this function, and Lightning's; none in the first epoch


@pytest.mark.parametrize("batches_left", [0, 1])
def test_epoch_sums_go_into_the_rest_of_the_epoch(batches_left: int) -> None:
    """Otherwise the metrics of a resumed epoch cover only the rest of it."""
    sums: dict[str, Any] = {}

    class Logs(Net):
        def __init__(self, values: list[float]) -> None:
            super().__init__()
            self.values, self.mean = values, torchmetrics.MeanMetric()

        def training_step(self, batch: torch.Tensor) -> Any:
            if len(self.values) > 0:
                value = torch.tensor(self.values.pop())
                self.log("it", value, on_step=True, on_epoch=True, batch_size=1)
                self.log("least", value, on_epoch=True, on_step=False, reduce_fx="min", batch_size=1)
                self.mean.update(value)
                self.log("object", self.mean, on_epoch=True, on_step=False)
            return super().training_step(batch, 0)

    class Takes(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            sums.update(lightning_private.metrics.epoch_sums(trainer))

    class Continues(Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            lightning_private.metrics.continue_sums(trainer, sums)

    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    trainer(Takes()).fit(Logs([1.0, 3.0]), loader)
    assert {name.partition(".")[2] for name in sums} == {"it", "least", "object"}
    made = trainer(Continues())
    made.fit(Logs([5.0] * batches_left), loader)
    metrics = {name: made.callback_metrics[name].item() for name in ("it_epoch", "least", "object")}
    mean = 3.0 if batches_left else 2.0
    assert metrics == {"it_epoch": mean, "least": 1.0, "object": mean}


def test_ends_update_after_the_last_batch_of_an_update_and_of_an_epoch() -> None:
    """Otherwise a run that is stopped would be saved without the gradients of an update."""
    found: list[bool] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            found.append(lightning_private.batches.ends_update(trainer))

    made = trainer(Looks(), max_steps=-1, max_epochs=1, accumulate_grad_batches=2)
    made.fit(Net(), torch.utils.data.DataLoader(torch.ones(3, 1)))
    assert found == [False, True, True]


def test_open_directories_is_asked_where_lightning_opens_and_writes_a_file(tmp_path: Path) -> None:
    """`import lightning_parallel` has called it."""
    for owner, name in ((saving, "pl_load"), (torch_io, "pl_load"), (torch_io, "_atomic_save")):
        assert getattr(owner, name).__qualname__.startswith("open_directories"), f"{owner.__name__}.{name}"
    io = torch_io.TorchCheckpointIO()
    for path in (str(tmp_path / "file"), tmp_path / "file"):
        io.save_checkpoint({"state_dict": {"a": torch.ones(2)}}, path)
        assert torch.equal(io.load_checkpoint(path)["state_dict"]["a"], torch.ones(2))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"There is no checkpoint at .*folder"):
        io.load_checkpoint(tmp_path / "folder")


def test_step_value_of_a_metric_is_what_lightning_logs() -> None:
    """Otherwise a metric's value of a step would be that of the last microbatch."""
    from torchmetrics import MeanMetric

    metric = MeanMetric()
    metric(torch.tensor(1.0))
    assert lightning_private.metrics.step_value(metric) == 1
    assert lightning_private.metrics.step_value(3.0) is None
    lightning_private.metrics.set_step_value(metric, torch.tensor(5.0))
    results = trainer().fit_loop.epoch_loop._results
    results.log("training_step", "mean", metric, on_step=True, on_epoch=False, metric_attribute="mean")
    assert results.metrics(on_step=True)["callback"]["mean"] == 5


def test_set_device_reaches_the_attribute_that_a_module_reads() -> None:
    """Otherwise ``self.device`` would be the first device in every replica."""
    module = Net()
    lightning_private.metrics.set_device(module, torch.device("meta"))
    assert module.device.type == "meta"
    plain = torch.nn.Linear(1, 1)
    lightning_private.metrics.set_device(plain, torch.device("meta"))
    assert "_device" not in vars(plain)


# -- public, but not promised --------------------------------------------------------------------------------


def test_clipping_by_norm_goes_through_the_method_that_is_replaced() -> None:
    """Otherwise the norm would be that of one stage."""
    assert "self.clip_grad_by_norm(" in inspect.getsource(type(trainer().precision_plugin).clip_gradients)


def test_workers_are_seeded_where_no_init_function_is_given() -> None:
    """Strategies give one, seeded by replica, before Lightning would give its own, seeded by rank."""
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.pytorch.trainer.connectors import data_connector

    source = inspect.getsource(data_connector._process_dataloader)
    assert source.index("strategy.process_dataloader") < source.index("_auto_add_worker_init_fn")
    assert list(inspect.signature(pl_worker_init_function).parameters) == ["worker_id", "rank"]


def test_the_hooks_that_strategies_override_exist() -> None:
    """Otherwise an override would never be called."""
    hooks = ("process_dataloader", "model_sharded_context", "restore_checkpoint_after_setup", "on_exception",
             "lightning_restore_optimizer", "distributed_sampler_kwargs", "pre_backward", "post_backward",
             "block_backward_sync")  # fmt: skip
    assert all(hasattr(Strategy, hook) or hasattr(L.pytorch.strategies.ParallelStrategy, hook) for hook in hooks)
