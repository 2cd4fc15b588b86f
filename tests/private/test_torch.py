"""private/torch/: each private name does what is expected of it. A failure says what a new version breaks.

What to do then: find what replaces the name, in torch's release notes or source, and change that one function.
"""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.dlpack import to_dlpack

from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch import autograd, groups, tensors
from lightning_parallel.private.torch import modules as of_modules
from tests.test_house import ROOT, modules
from tools.workers.pool import WorkerPool

# What other tests would miss at once, each with their file.
ELSEWHERE = {
    **dict.fromkeys(
        ("tensors_in", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"), "absent/test_answers.py"
    ),
    "subclass_functions_disabled": "absent/test_tensor.py",
    "dispatch_disabled": "absent/test_tensor.py",
    "make_parameter": "absent/test_tensor.py",
    "written_arguments": "absent/test_tensor.py",
    "VALUE_OF": "cuts/test_one_sided.py",
    "PACK_SEQUENCES": "strategies/test_any_batch.py",
    "PAD_SEQUENCES": "absent/test_tensor.py",
    "norms_of": "gradients/test_clipping.py",
    "scale_all": "gradients/test_clipping.py",
    **dict.fromkeys(("add_all", "copy_all"), "pipeline/test_weights.py"),
    **dict.fromkeys(("differences", "lerp_all"), "pipeline/test_staleness.py"),
    "run_backward": "backward/test_split.py",
    "saved_value": "backward/test_split.py",
    "memory_is_shared": "backward/test_split.py",
    "shape_of_result": "losses/test_graph.py",
    "shape_of_operand": "losses/test_graph.py",
    "like_edge": "losses/test_graph.py",
    "where_created": "strategies/test_loss_means.py",
    "ATTENTION_ON_CPU": "tracing/test_operations.py",
    "makes_memory": "test_disk_offload.py",
    "is_zero_tensor": "test_disk_offload.py",
    **dict.fromkeys(("parameters_of", "buffers_of", "modules_of"), "test_local_replicas.py"),
    "places_of": "pipeline/test_weights.py",
    "shallow_copy": "test_local_replicas.py",
    "is_compiled": "test_local_replicas.py",
    "has_hooks": "tensor/test_layer.py",
    "move_forward_hooks": "tensor/test_layer.py",
    "forward_hooks": "test_interception.py",
    "has_gradient_hooks": "strategies/test_epoch_ends.py",
    "has_step_hooks": "strategies/test_owners.py",
    "hooks_of_all_optimizers_left_out": "checks/test_optimizer_trial.py",
    "hooks_beside": "backward/test_split.py",
    "not_recorded": "messages/test_channel.py",
    "values_read_by": "strategies/test_fully_sharded.py",
    "METADATA_CLASSES": "checkpoint/test_reading.py",
    **dict.fromkeys(("TorchDispatchMode", "boxed_group", "group_by_name"), "recipes/test_compare.py"),
    "default_store": "callbacks/test_preemption.py",
    "default_group": "strategies/test_world.py",
    "CommonScaler": "strategies/test_precision.py",
    "ThreadApart": "checkpoint/test_background.py",
}


def test_every_name_is_used_and_pinned() -> None:
    package = ROOT / "lightning_parallel"
    room = package / "private" / "torch"
    others = [file.read_text() for file in modules(package, ROOT / "recipes") if file.parent != room]
    here = Path(__file__).read_text().replace("def test_", "")
    source = "".join(file.read_text() for file in sorted(room.glob("*.py")))
    public = {
        name for part in (tensors, autograd, of_modules, groups) for name in vars(part) if not name.startswith("_")
    }
    found = {name: rf"(?m)^((def|class) )?{name}\b|\b{name} as {name}$" for name in sorted(public)}
    given = [name for name, pattern in found.items() if re.search(pattern, source)]
    assert all((Path(__file__).parents[1] / file).exists() for file in ELSEWHERE.values())
    assert {"tensors_in", "ThreadApart", "VALUE_OF", "tree_map"} <= {*given}
    for name in given:
        assert any(name in text for text in others), f"{name} is not used"
        assert name in here, f"{name} is not pinned"


# -- tensors -------------------------------------------------------------------------------------------------


class Boxed(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_wrapper_tensor_asks_for_memory_that_it_does_not_have() -> None:
    """Otherwise compiled kernels would read from address 0."""
    made = tensors.wrapper_tensor(Boxed, (2, 3), dtype=torch.float64, device=torch.device("meta"))
    with pytest.raises(RuntimeError) as raised:
        to_dlpack(made)
    assert tensors.asks_for_memory(raised.value)


def test_clone_all_copies_to_the_bit() -> None:
    values = [torch.tensor([-0.0, torch.nan, torch.inf, 5e-324]), torch.tensor([1 / 3], dtype=torch.bfloat16)]
    for copies in (tensors.clone_all(values), torch._foreach_mul(values, scalar=1)):  # type: ignore[arg-type]
        for copy, value in zip(copies, values, strict=True):
            assert copy.data_ptr() != value.data_ptr()
            assert torch.equal(copy.view(torch.uint8), value.view(torch.uint8))


def test_drawing_for_nothing_reads_what_switches_draws_off() -> None:
    """Attention without dropout would otherwise be computed for a tensor without values."""
    dropout = torch.ops.aten.native_dropout.default
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    x = torch.ones(1)
    assert not tensors.drawing_for_nothing(dropout, (x, 0.5, True), {})
    assert tensors.drawing_for_nothing(dropout, (x, 0.5, False), {})
    assert tensors.drawing_for_nothing(dropout, (x, 0.0, True), {})
    assert tensors.drawing_for_nothing(attention, (x, x, x), {})
    assert not tensors.drawing_for_nothing(attention, (x, x, x), {"dropout_p": 0.1})


def test_version_of_counts_changes_in_place_and_full_backward_hooks_are_told() -> None:
    x = torch.ones(2)
    before = tensors.version_of(x)
    x[:1].add_(1)
    assert tensors.version_of(x) == before + 1
    tensors.set_version(x, before)
    assert tensors.version_of(x) == before
    module = nn.Linear(1, 1)
    assert not of_modules.has_full_backward_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert of_modules.has_full_backward_hooks(module)


def test_a_view_knows_what_it_is_a_view_of() -> None:
    tensor = torch.ones(2, 2)
    assert tensors.base_of(tensor[0]) is tensor and tensors.base_of(tensor) is None


# -- the graph of a backward ---------------------------------------------------------------------------------


def test_saved_tensor_is_none_where_hooks_hold_it() -> None:
    """Otherwise a layer of a user's that runs again would fail: its tensors are handed out once."""
    asked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, asked.append):
        product = (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2, requires_grad=True)).grad_fn
    assert product is not None
    assert autograd.saved_tensor(product, "self") is None and not asked

    class Silent:
        _raw_saved_self = object()  # of a torch that doesn't tell

    assert autograd.saved_tensor(Silent(), "self") is None  # type: ignore[arg-type]


def test_is_graphed_knows_what_torch_makes_of_a_forward() -> None:
    """Otherwise a layer whose output each call overwrites would train in a pipeline."""
    assert "func.forward = make_graphed_forward(" in inspect.getsource(torch.cuda.graphs.make_graphed_callables)
    layer = nn.Linear(2, 2)
    assert not of_modules.is_graphed(layer)

    def new_forward(x: Tensor) -> Tensor:
        return x

    new_forward.__module__ = "torch.cuda.graphs"
    layer.forward = new_forward  # type: ignore[method-assign]
    assert of_modules.is_graphed(layer)


# -- distributed ---------------------------------------------------------------------------------------------


def sizes_of_the_cache_of_meshes() -> tuple[int, int]:
    """The misses that have filled it, before it is emptied and after."""
    half = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    half + half
    _, before = torch._C._get_DTensor_sharding_propagator_cache_stats()
    groups.forget_meshes()
    _, after = torch._C._get_DTensor_sharding_propagator_cache_stats()
    return before, after


def test_forget_meshes_empties_the_cache_that_holds_them(pool: WorkerPool) -> None:
    """Otherwise a second run in a process fails: "Could not resolve the process group registered under the name"."""
    assert all(before > after == 0 for before, after in pool.run(sizes_of_the_cache_of_meshes, 2))


def group_of_two() -> tuple[list[int], int, bool]:
    """Of three ranks, two make a group, find it again, and make it anew when it is gone; rank 1 is in more others."""
    if dist.get_rank() == 2:
        return [], 0, False
    groups.group_of_members([dist.get_rank()], None)
    if dist.get_rank() == 1:
        groups.group_of_members([1], None, purpose="another")
    first, again, other = (
        groups.group_of_members([0, 1], timedelta(seconds=20), purpose=purpose) for purpose in ("a", "a", "b")
    )
    members = dist.get_process_group_ranks(first)
    for group in (first, other):
        dist.destroy_process_group(group)
    anew = groups.group_of_members([0, 1], timedelta(seconds=20), purpose="a")
    value = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(value, group=anew)
    return members, int(value), first is again and first is not other and anew is not first


def test_a_group_is_made_by_its_members_alone(pool: WorkerPool) -> None:
    """Otherwise a start of a thousand ranks would make the groups of all, or wait under names that nobody else has."""
    assert pool.run(group_of_two, 3) == [([0, 1], 3, True)] * 2 + [([], 0, False)]


def test_only_what_gloo_says_of_addresses_becomes_an_error_with_the_setting() -> None:
    """That these are gloo's words is shown between two machines, in ranks/test_process_group.py."""
    for words, said in (
        ("Gloo connectFullMesh failed with [pair.cc:152] SO_ERROR, remote=[127.0.0.1]:1$0", "at 127.0.0.1.*GLOO_"),
        ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", "the ranks. .*GLOO_"),
        ("out of memory", "^out of memory$"),
    ):
        with pytest.raises(RuntimeError, match=said), groups.connecting():
            raise RuntimeError(words)


def sizes_inside() -> list[int]:
    """Those of the default group: inside, in a thread apart, and once another one has been inside."""
    seen: list[int] = []
    with groups.default_group(groups.group_of_members([dist.get_rank()], None)):
        seen.append(dist.get_world_size())
        apart = groups.ThreadApart(target=lambda: seen.append(dist.get_world_size()))
        apart.start()
        apart.join()
        with groups.default_group(groups.silent_group_of([0, 1])):
            pass
        seen.append(dist.get_world_size())
    return seen


def test_default_group_is_another_inside_but_for_a_thread_apart(pool: WorkerPool) -> None:
    """A save in the background would take a step's ranks."""
    assert pool.run(sizes_inside, 2) == [[1, 2, 1]] * 2


def test_silent_group_of_other_ranks_sends_nothing(pool: WorkerPool) -> None:
    """Otherwise a look at a step, which one rank may take alone, would wait for the others."""
    assert pool.run(gathered_silently, 2) == [[0.0, 0.0], [1.0, 1.0]]


def gathered_silently() -> list[float]:
    group = groups.silent_group_of([0, 1])
    own, gathered = torch.tensor([float(dist.get_rank())]), torch.empty(2)
    groups.gather_into(gathered, own, group=group)
    groups.reduce_scatter_into(own, gathered, group=group)
    return gathered.tolist()


def test_group_on_paper_notes_what_a_part_of_a_model_would_send() -> None:
    """Otherwise tensor parallelism would be planned as if it cost nothing. There is no process group here."""
    group, own = GroupOnPaper(4), torch.ones(3)
    groups.gather_into(torch.empty(12), own, group=group)  # outside, nothing is noted
    with group.noted() as sent:
        dist.all_reduce(own, group=group)
        assert dist.all_reduce(own, group=group, async_op=True) is None
        groups.gather_into(torch.empty(12), own, group=group)
        groups.reduce_scatter_into(torch.empty(3), torch.empty(12), group=group)
    assert (group.rank(), group.size()) == (0, 4)
    assert sent == [("all_reduce", 12), ("all_reduce", 12), ("all_gather", 48), ("reduce_scatter", 48)]


def test_fake_tensors_have_a_dtype_under_autocast_and_attention_that_saves_no_scores() -> None:
    """Otherwise plans for described devices would count float32, and the square of the sequence."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with tensors.FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(note, note):
        q, k, v = (torch.empty(1, 2, 256, 8, requires_grad=True) for _ in range(3))
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert max(tensor.numel() for tensor in saved) == q.numel()
    assert {tensor.dtype for tensor in saved if tensor.dim() == 4} == {torch.bfloat16}


def aborted() -> bool:
    groups.group_of_members([dist.get_rank()], None)
    groups.abort_groups()
    return dist.is_initialized()


def test_abort_groups_leaves_all(pool: WorkerPool) -> None:
    """Otherwise a rank that fails on a GPU would wait for messages of others, and they for it."""
    assert pool.run(aborted, 2) == [False, False]
