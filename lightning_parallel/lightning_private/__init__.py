"""Every private name of Lightning and torchmetrics that the package uses, with the reason why no public one does.

``tests/test_lightning_private.py`` pins each of them: when a new version of Lightning breaks one, a test there fails
and says what depends on it. Nothing else in the package imports or reads a private name of Lightning.
"""

from lightning_parallel.lightning_private.batches import (
    around_step_hooks,
    before_each_batch,
    continue_after_epoch,
    continue_epoch,
    ends_update,
    time_without_broadcasts,
    validation_has_ended,
)
from lightning_parallel.lightning_private.checkpoints import open_directories, save_last
from lightning_parallel.lightning_private.data import (
    before_batch_transfer,
    loader_source,
    mode_of,
    samples_predicted,
    take_back_loaders,
)
from lightning_parallel.lightning_private.epoch_sums import continue_sums, epoch_sums
from lightning_parallel.lightning_private.launching import (
    callbacks_of,
    init_process_group,
    launched_by_make_launcher,
    layer_sync_of,
    move_optimizers,
    say_device,
    script_launcher,
    trainer_of,
)
from lightning_parallel.lightning_private.metrics import (
    evaluation_outputs,
    logged_step,
    metric_places,
    metrics_of_no_loader,
    reads_training_metric,
    replace_metric_places,
    set_device,
    set_step_value,
    show_in_progress_bar,
    step_metrics,
    step_value,
)
from lightning_parallel.lightning_private.replaced import replaced
from lightning_parallel.lightning_private.signals import requeue_by_slurm, say_terminated, take_signals

__all__ = [
    "around_step_hooks",
    "before_batch_transfer",
    "before_each_batch",
    "callbacks_of",
    "continue_after_epoch",
    "continue_epoch",
    "continue_sums",
    "ends_update",
    "epoch_sums",
    "evaluation_outputs",
    "init_process_group",
    "launched_by_make_launcher",
    "layer_sync_of",
    "loader_source",
    "logged_step",
    "metric_places",
    "metrics_of_no_loader",
    "mode_of",
    "move_optimizers",
    "open_directories",
    "reads_training_metric",
    "replace_metric_places",
    "replaced",
    "requeue_by_slurm",
    "samples_predicted",
    "save_last",
    "say_device",
    "say_terminated",
    "script_launcher",
    "set_step_value",
    "show_in_progress_bar",
    "step_metrics",
    "step_value",
    "take_back_loaders",
    "take_signals",
    "set_device",
    "time_without_broadcasts",
    "trainer_of",
    "validation_has_ended",
]
