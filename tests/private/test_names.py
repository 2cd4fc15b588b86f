"""Each private name of torch and of Lightning is used, and a test misses what it does. Those that no other test would
miss at once are in test_torch.py and test_lightning.py; here are the others, by the file whose tests miss them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_house import ROOT, is_private, modules

ELSEWHERE: dict[str, dict[str, str]] = {
    "torch": {
        "absent/test_answers.py": "tensors_in tree_flatten tree_leaves tree_map tree_unflatten",
        "absent/test_tensor.py": "subclass_functions_disabled dispatch_disabled make_parameter written_arguments "
        "PAD_SEQUENCES",
        "backward/test_split.py": "run_backward saved_value saved_tensor memory_is_shared hooks_beside",
        "callbacks/test_preemption.py": "default_store",
        "checkpoint/test_background.py": "ThreadApart",
        "checkpoint/test_reading.py": "METADATA_CLASSES",
        "checks/test_optimizer_trial.py": "hooks_of_all_optimizers_left_out",
        "cuts/test_one_sided.py": "VALUE_OF",
        "gradients/test_averaging.py": "norms_of scale_all",
        "losses/test_graph.py": "shape_of_result shape_of_operand like_edge",
        "messages/test_channel.py": "record_operations",
        "pipeline/test_staleness.py": "differences lerp_all",
        "pipeline/test_weights.py": "add_all copy_all clone_all places_of",
        "ranks/test_process_group.py": "forget_meshes",
        "recipes/test_compare.py": "TorchDispatchMode boxed_group group_by_name",
        "strategies/test_any_batch.py": "PACK_SEQUENCES",
        "strategies/test_epoch_ends.py": "has_gradient_hooks",
        "strategies/test_fully_sharded.py": "values_read_by",
        "strategies/test_loss_means.py": "where_created",
        "strategies/test_owners.py": "has_step_hooks",
        "strategies/test_precision.py": "CommonScaler",
        "strategies/test_refusals.py": "has_hooks_before",
        "tensor/test_layer.py": "has_hooks move_forward_hooks",
        "test_disk_offload.py": "makes_memory is_zero_tensor",
        "test_interception.py": "forward_hooks",
        "test_local_replicas.py": "parameters_of buffers_of modules_of shallow_copy is_compiled",
        "tracing/test_trace.py": "ATTENTION_ON_CPU",
    },
    "lightning": {
        "callbacks/test_averages.py": "copy_of_module are_known_functions walks leave_out_schedulers",
        "callbacks/test_performance_monitor.py": "logged_step",
        "callbacks/test_preemption.py": "callbacks_of take_signals say_terminated save_last",
        "callbacks/test_resumed_moments.py": "ends_update validation_has_ended continue_epoch continue_after_epoch "
        "epoch_sums continue_sums",
        "checkpoint/test_plain.py": "open_directories",
        "loading/test_first_batch.py": "LoaderSource take_back_loaders",
        "loading/test_loaders.py": "where_loaders_end read_by_loop",
        "ranks/test_rendezvous.py": "init_process_group",
        "results/test_published_metrics.py": "metric_places replace_metric_places evaluation_outputs "
        "metrics_of_no_loader step_value set_step_value",
        "strategies/test_after_an_error.py": "replaced",
        "strategies/test_host_reads.py": "step_metrics",
        "strategies/test_late_values.py": "time_without_broadcasts",
        "strategies/test_lightning_idioms.py": "around_step_hooks",
        "strategies/test_refusals.py": "launched_by_make_launcher layer_sync_of refuse_validation_by_time",
        "strategies/test_saved.py": "asked_weights_only",
    },
}


def named_by(node: ast.stmt) -> list[str]:
    """The public names that a line of a module gives."""
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Subscript):  # which is a type's alias
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names if alias.asname == alias.name]
    return [name for name in names if not is_private(name)]


@pytest.mark.parametrize("room", ELSEWHERE)
def test_every_name_is_used_and_pinned(room: str) -> None:
    package, tests = ROOT / "lightning_parallel", Path(__file__).parents[1]
    folder = package / "private" / room
    assert all((tests / file).exists() for file in ELSEWHERE[room])
    others = [
        file.read_text() for file in modules(ROOT / "lightning_parallel", ROOT / "recipes") if file.parent != folder
    ]
    pinned = (tests / "private" / f"test_{room}.py").read_text().replace("def test_", "")
    pinned += " ".join(ELSEWHERE[room].values())
    given = [name for file in modules(folder) for node in ast.parse(file.read_text()).body for name in named_by(node)]
    for name in given:
        assert any(name in text for text in others), f"{name} is not used"
        assert name in pinned, f"{name} is not pinned"
