"""private/torch/: each private name does what is expected of it. A failure says what a new version breaks.

What to do then: find what replaces the name, in torch's release notes or source, and change that one function.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, deque
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.dlpack import to_dlpack

from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch import autograd, groups, tensors
from tools.workers.pool import WorkerPool

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


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_are_walked_as_by_torch() -> None:
    def seen(leaf: Any) -> Any:
        return type(leaf), id(leaf)

    for value in (
        [torch.ones(1), 1, None, (), {}],
        {"b": (1, [nn.Parameter(torch.ones(1))]), "a": {1, 2}},
        (Pair(1, [2]), OrderedDict(b=1, a=[None]), deque([{}, (3,)]), torch.Size([2, 3])),
        Pair("text", 1.0),
    ):
        leaves, structure = tensors.tree_flatten(value)
        assert [*map(seen, tensors.tree_leaves(value))] == [*map(seen, leaves)]
        mapped, expected = tensors.tree_map(seen, value), tensors.tree_unflatten([*map(seen, leaves)], structure)
        assert mapped == expected and type(mapped) is type(expected)


def test_arguments_are_flattened_as_by_torch() -> None:
    x = torch.ones(1)
    for args, kwargs in (((x, 1, None), {}), ((x, [1, 2]), {}), ((), {}), ((x,), {"dim": (0,)})):
        assert tensors.flat_arguments(args, kwargs) == tensors.tree_flatten((args, kwargs))


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


def test_version_of_counts_changes_in_place_and_base_of_tells_a_view() -> None:
    x = torch.ones(2)
    before = tensors.version_of(x)
    x[:1].add_(1)
    assert tensors.version_of(x) == before + 1
    tensors.set_version(x, before)
    assert tensors.version_of(x) == before
    assert tensors.base_of(x[0]) is x and tensors.base_of(x) is None


def test_torch_gives_a_graphed_layer_its_forward_where_it_is_looked_for() -> None:
    """Otherwise one whose output each call overwrites would train in a pipeline: strategies/test_refusals.py has it."""
    assert "func.forward = make_graphed_forward(" in inspect.getsource(torch.cuda.graphs.make_graphed_callables)


def test_saved_tensor_is_none_where_torch_does_not_tell_of_hooks() -> None:
    class Silent:
        _raw_saved_self = object()

    assert autograd.saved_tensor(Silent(), "self") is None  # type: ignore[arg-type]


# -- distributed ---------------------------------------------------------------------------------------------


def group_of_two() -> list[int]:
    """Two ranks make a group, find it again, and make it anew when it is gone; rank 1 is in more others."""
    if dist.get_rank() == 2:
        return []
    for purpose in ("", "another")[: 1 + dist.get_rank()]:
        groups.group_of_members([dist.get_rank()], None, purpose=purpose)
    first, again, other = (
        groups.group_of_members([0, 1], timedelta(seconds=20), purpose=purpose) for purpose in ("a", "a", "b")
    )
    assert first is again and first is not other
    for group in (first, other):
        dist.destroy_process_group(group)
    anew = groups.group_of_members([0, 1], timedelta(seconds=20), purpose="a")
    dist.all_reduce(torch.ones(1), group=anew)
    assert anew is not first
    return dist.get_process_group_ranks(anew)


def test_a_group_is_made_by_its_members_alone(pool: WorkerPool) -> None:
    """Otherwise a start of a thousand ranks would make the groups of all, or wait under names that nobody else has."""
    assert pool.run(group_of_two, 3) == [[0, 1], [0, 1], []]


def test_only_what_gloo_says_of_addresses_becomes_an_error_with_the_setting() -> None:
    """That these are gloo's words is shown between two machines, in clusters/test_slurm.py."""
    for words, said in (
        ("Gloo connectFullMesh failed with [pair.cc:152] SO_ERROR, remote=[127.0.0.1]:1$0", "at 127.0.0.1.*GLOO_"),
        ("Gloo connectFullMesh failed with [pair.h:311] Connect timeout [none]", "the ranks. .*GLOO_"),
        ("out of memory", "^out of memory$"),
    ):
        with pytest.raises(RuntimeError, match=said), groups.connecting():
            raise RuntimeError(words)


def inside() -> tuple[list[int], list[float]]:
    """The sizes of the default group: inside, in a thread apart, and once another one has been inside. And what a
    silent group of other ranks gathers."""
    sizes: list[int] = []
    silent = groups.silent_group_of([0, 1])
    with groups.default_group(groups.group_of_members([dist.get_rank()], None)):
        sizes.append(dist.get_world_size())
        apart = groups.ThreadApart(target=lambda: sizes.append(dist.get_world_size()))
        apart.start()
        apart.join()
        with groups.default_group(silent):
            pass
        sizes.append(dist.get_world_size())
    own, gathered = torch.tensor([float(dist.get_rank())]), torch.empty(2)
    groups.gather_into(gathered, own, group=silent)
    groups.reduce_scatter_into(own, gathered, group=silent)
    return sizes, gathered.tolist()


def test_default_group_is_another_inside_but_for_a_thread_apart_and_a_silent_one_sends_nothing(
    pool: WorkerPool,
) -> None:
    """A save in the background would take a step's ranks; a look at a step, which one rank may take alone, would wait
    for the others."""
    assert pool.run(inside, 2) == [([1, 2, 1], [0.0, 0.0]), ([1, 2, 1], [1.0, 1.0])]


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
