"""Every private name of torch that the package uses, with the reason why no public one does.

``tests/private/test_torch.py`` pins each of them: when a new version of torch breaks one, a test there fails and says
what depends on it. Nothing else in the package imports or reads a private name of torch. ``checkpoint/slices.py``
implements three private methods, by which torch's checkpoints ask a tensor for its parts.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

# Names that others import from here.
# Running layers without memory and without arithmetic, for what autograd would save. Its module isn't public.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint import metadata
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import Optimizer

# Observing operators (recipes/traffic.py). Named as public by torch's own documentation, but its module is not.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Walking nested containers. torch has no public pytree; transformers registers its outputs with this one.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.hooks import RemovableHandle

# Collectives that gather into one tensor, or scatter one. They have these names since torch 2.13, which warns of the
# earlier ones.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T", bound=Tensor)

# What the metadata of a distributed checkpoint is made of: (module, class or function) of each pickled object.
METADATA_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    }
)


# What gives a tensor's value to Python: x.item(), bool(x), float(x).
VALUE_OF = torch.ops.aten._local_scalar_dense.default

# What torch.nn.utils.rnn.pack_padded_sequence runs: how large its result is depends on the lengths' values.
PACK_SEQUENCES = torch.ops.aten._pack_padded_sequence.default
PAD_SEQUENCES = torch._VF._pad_packed_sequence  # type: ignore[attr-defined]

# What scaled_dot_product_attention runs on a CPU, for which torch counts no operations.
ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# Operations on lists of tensors of one dtype and device: a few kernels on a GPU, where a loop launches one for each.
# torch's optimizers are made of them. Older versions clone by a multiplication.
clone_all = getattr(torch, "_foreach_clone", None) or partial(torch._foreach_mul, scalar=1)
add_all = torch._foreach_add_
differences = torch._foreach_sub
scale_all = torch._foreach_mul_
lerp_all = torch._foreach_lerp_
copy_all = torch._foreach_copy_


# -- tensors -----------------------------------------------------------------------------------------------------


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nested container, such as a function's arguments, in order."""
    if isinstance(value, Tensor):  # as most outputs are; the walk is slow
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def wrapper_tensor(
    kind: type[T],
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
    requires_grad: bool = False,
) -> T:
    """A tensor of a subclass, without memory of its own. "Extending PyTorch" documents this constructor for subclasses
    with ``__torch_dispatch__``; its name is private."""
    made: T = Tensor._make_wrapper_subclass(
        kind, size, strides=strides, dtype=dtype, device=device, requires_grad=requires_grad
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # as for fake tensors: else a compiled kernel would get address 0
    return made


def asks_for_memory(error: RuntimeError) -> bool:
    """Has code in C++ asked a tensor for memory that it doesn't have? Only the text tells."""
    return "erroneously tracing into a custom kernel" in str(error)


def make_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of a subclass. nn.Parameter sets this attribute on
    subclasses that it wraps, but it can't wrap a tensor without memory."""
    tensor._is_param = True  # type: ignore[attr-defined]


def subclass_functions_disabled() -> AbstractContextManager[None]:
    """Inside, functions on a tensor subclass don't go through its ``__torch_function__``: for that method itself, and
    for reading a shape without the detour."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return disabled


def dispatch_disabled() -> AbstractContextManager[None]:
    """Inside, an operation on a tensor subclass doesn't go through its ``__torch_dispatch__``: for operations that
    change a tensor's shape in place, whose result has to be that very tensor."""
    disabled: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return disabled


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to. Only its schema tells."""
    for i, name in _written_by(operator):
        yield args[i] if i < len(args) else kwargs.get(name)


def makes_memory(operator: Any) -> bool:
    """Do all results of an operator, as a dispatch mode sees it, lie in memory of their own? Its schema says so; an
    operator that takes functions has none."""
    is_plain = isinstance(operator, torch._ops.OpOverload)
    return is_plain and all(result.alias_info is None for result in operator._schema.returns)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that autograd takes this one for a view of; None if it is no view."""
    return tensor._base


def is_zero_tensor(tensor: Tensor) -> bool:
    """Does the tensor stand for zeros, without memory? Autograd makes such ones in forward mode."""
    return tensor._is_zerotensor()


@cache  # to ask the schema takes longer than most operations on the meta device
def _written_by(operator: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operator writes to."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; 0 for one made in inference mode, where nobody counts. torch
    documents the counter, but names it as private."""
    return 0 if tensor.is_inference() else tensor._version


def set_version(tensor: Tensor, version: int) -> None:
    """Have :func:`version_of` count on from a number, for a tensor that has got back the value that it had then."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


def drawing_for_nothing(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is an operation that may draw random numbers called such that it draws none? Examples are attention without
    dropout and a recurrent layer in evaluation. Only the schema tells which argument decides."""
    for i, argument in enumerate(operator._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if (argument.name in ("dropout_p", "dropout", "p") and value == 0) or (argument.name == "train" and not value):
            return True
    return False


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The norms of tensors of one dtype and device, computed and returned in another dtype, in a few kernels on a GPU.
    torch's public ``get_total_norm`` rounds them to the tensors' own dtype."""
    norms: list[Tensor] = list(torch._foreach_norm(tensors, 2, dtype=dtype))
    return norms


# -- the graph of a backward -------------------------------------------------------------------------------------


def run_backward(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[GradientEdge] = ()
) -> None:
    """``torch.autograd.backward`` from edges: up to ``leaves``, or to all leaves. Gradients have to have their edges'
    shapes. torch's own compares them, in Python, which takes longer than a small layer's backward. Its engine doesn't:
    it sums what has been broadcast."""
    _engine_run_backward(
        tuple(edges), tuple(gradients), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def saved_value(node: Node, name: str) -> Any:
    """A non-tensor that a node of the graph has saved, such as a shape or a factor. torch documents these attributes
    for looking at a graph, but names them as private."""
    return getattr(node, f"_saved_{name}")


def saved_tensor(node: Node, name: str) -> Tensor | None:
    """A tensor that a node of the graph has saved, if it is still what was saved. None if hooks hold it: the hooks of
    torch's checkpoints give it out once in a backward, and the node needs it itself. Where torch doesn't tell, hooks
    are taken to hold it."""
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", "not told") is not None:
        return None
    saved: Tensor | None = getattr(node, f"_saved_{name}")
    return saved


def shape_of_result(node: Node) -> torch.Size:
    """The shape of the first tensor that the operation of a node of the graph has returned."""
    return torch.Size(_metadata(node)[0].shape)


def like_edge(edge: GradientEdge) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape, dtype and device that a gradient for an edge of a graph has to have. The tensor it belongs to may be
    gone."""
    like = _metadata(edge.node)[edge.output_nr]
    return torch.Size(like.shape), like.dtype, like.device


def where_created(node: Node) -> list[str]:
    """The lines of code that a node of the graph comes from, the outermost first, if it was made under
    ``torch.autograd.set_detect_anomaly``. They have no public name in torch."""
    metadata: Any = node.metadata  # torch declares it as a method, and makes it a dictionary
    lines: list[str] = metadata.get("traceback_", [])
    return lines


def shape_of_operand(node: Node, operand: int) -> torch.Size | None:
    """The shape of an operand of a node of the graph; None if it needs no gradient."""
    following, output = node.next_functions[operand]
    return None if following is None else torch.Size(_metadata(following)[output].shape)


def _metadata(node: Node) -> list[Any]:
    """The metadata (shape, dtype, device) of a node's incoming gradients. torch documents it, but names it as
    private."""
    return node._input_metadata


def hooks_beside(handle: RemovableHandle) -> int:
    """How many hooks of the same kind there are on a node of the graph beside the one that ``handle`` removes. The node
    itself doesn't tell."""
    hooks = handle.hooks_dict_ref()
    return 0 if hooks is None else len(hooks) - 1


def memory_is_shared(tensor: Tensor) -> bool:
    """Do other tensors refer to this one's memory? True too if that isn't known. No public name counts references."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return True
    own = 2  # the tensor's, and that of the object by which is asked
    shared: bool = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > own
    return shared


# -- modules -----------------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary from which a module's own parameters are read. ``setattr`` would check each parameter in every
    step, and refuses a plain tensor in a parameter's place, which ``torch.func.functional_call`` puts there too."""
    return module._parameters


def places_of(module: nn.Module, names: Mapping[int, str]) -> list[tuple[dict[str, Any], str, str]]:
    """Every place in a module's tree from which one of these parameters (``names``, by id) is read, tied ones included:
    the dictionary, the key in it, and the name. Gathering replaces what is there, and so do versions of the weights."""
    stores = [parameters_of(part) for part in module.modules()]
    return [(store, key, names[id(each)]) for store in stores for key, each in store.items() if id(each) in names]


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary from which a module's own buffers are read."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dictionary from which a module's own children are read."""
    return module._modules


def has_hooks(module: nn.Module, *, on_outputs: bool = True) -> bool:
    """Has anyone registered a hook on the module? If not ``on_outputs``, hooks that see the outputs only don't count.
    torch has no public way to ask."""
    left_out = () if on_outputs else ("_forward_hooks",)
    return any(name.endswith("_hooks") and value for name, value in vars(module).items() if name not in left_out)


def forward_hooks(module: nn.Module) -> int:
    """The number of hooks that see this module's outputs."""
    return len(module._forward_hooks)


def move_forward_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks on a module's outputs to another module. The handles that remove them keep working."""
    for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(new, name, getattr(old, name))


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Does a hook see, and perhaps change, the gradients of this module's inputs and outputs?"""
    return bool(module._backward_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Does a hook of the user's see, and perhaps change, the gradient of this tensor? torch has no public way to ask.
    fully_shard's own hooks only gather a unit, and those of this library are known."""
    hooks = [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]
    modules = (getattr(getattr(hook, "func", hook), "__module__", "") for hook in hooks)  # of a partial's function
    return any(not module.startswith(("torch.distributed.fsdp", "lightning_parallel.")) for module in modules)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Do hooks of the user's run around an optimizer's steps? torch has no public way to ask."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module without parameters, buffers and children of its own, as torch.nn.DataParallel begins one.
    Modules override the method to copy what else they need: recurrent layers do."""
    copy: nn.Module = module._replicate_for_data_parallel()
    return copy


def is_compiled(module: nn.Module) -> bool:
    """Is it what torch.compile has made of a module? That hands all assignments on, those of a copy too."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_graphed(module: nn.Module) -> bool:
    """Is its forward of torch.cuda.make_graphed_callables? Only the place of its definition tells."""
    return getattr(module.forward, "__module__", None) == torch.cuda.graphs.__name__


# -- process groups ----------------------------------------------------------------------------------------------


def boxed_group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator of torch.distributed was given, if ``argument`` is one. It is an object of
    TorchScript, whose type only a private method tells."""
    if isinstance(argument, torch.ScriptObject) and str(argument._type()).endswith(".ProcessGroup"):
        return dist.ProcessGroup.unbox(argument)
    return None


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group of a name, as functional collectives (such as DTensor's) name theirs."""
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, no-any-return, arg-type]


@contextmanager
def connecting() -> Iterator[None]:
    """Inside, ranks make a group. By gloo each rank tells the others its address. If another machine can't reach one,
    gloo's error names the address, and no setting. The error here names the setting. gloo's has no type of its own, so
    it is known by its words.

    Raises:
        RuntimeError: gloo could not connect the ranks.
    """
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        tried = re.search(r"remote=\[(.+?)\]", str(error))
        raise RuntimeError(
            f"gloo could not connect the ranks{f': nobody answered at {tried[1]}' if tried else ''}. Unless one of "
            f"them has stopped, which its own output says, they told each other the wrong addresses: gloo takes that "
            f"of a machine's name, which many systems set to 127.0.1.1. Set GLOO_SOCKET_IFNAME on all machines to the "
            f"network interface that joins them, as `ip -br address` lists it; in recipes, cluster.interface."
        ) from error


def group_of_members(
    ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None, purpose: str = ""
) -> dist.ProcessGroup:
    """The group of some ranks for a purpose, this rank among them. Its members alone make it, and find it again as long
    as the default group lives. So many Trainers in a process have no more groups than one.

    The public ``new_group(use_local_synchronization=True)`` names a group by its ranks and by the number of groups that
    the calling rank is in. Members that are in different numbers of groups would wait for each other under different
    names. Here the name is made of the arguments, and of how many groups of just these there have been: under a name
    that was used before, by a group that was destroyed since, members would find addresses at which nobody listens. It
    is short, since it stands before every key in the store.

    Args:
        ranks: global ranks in ascending order.
        timeout: None for torch's default.
        backend: None for the default group's.
        purpose: what only this group is used for, if the same ranks need several.
    """
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    kind = dist.Backend(backend or default_backend)
    digest = hashlib.sha256(repr((tuple(ranks), timeout, kind, purpose)).encode()).hexdigest()
    for known, name in c10d._world.pg_names.items():
        if name.startswith(digest):
            return known
    # Each member counts for itself. The store lives as long as the default group, so all reach the same number.
    count = store.add(f"{digest}/of_rank_{dist.get_rank()}", 1)
    with connecting():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            kind,
            store,
            f"{digest}/{count}",  # type: ignore[arg-type]  # a type of its own since torch 2.10
            timeout=timeout or c10d._get_default_timeout(kind),
        )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


@contextmanager
def not_recorded() -> Iterator[None]:
    """Inside, this thread's operations are left out of profilers' traces. torch has nothing public for that."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def silent_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group in which nothing is sent, known to this rank alone: each collective is over at once, and each rank gets
    its own values back. ``ranks`` are global ones in ascending order, this rank among them. It is made once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (makes the backend known)

    return group_of_members(ranks, None, "fake")


class ThreadApart(threading.Thread):
    """A thread for which :func:`default_group` changes nothing: its default group stays that of all ranks."""


class _World(c10d._World):
    """torch's record of the process groups, with another default group for code that runs inside
    :func:`default_group`."""

    instead: dist.ProcessGroup | None = None

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        if self.instead is None or isinstance(threading.current_thread(), ThreadApart):
            return self._default_pg
        return self.instead

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, ``group`` is the default group of torch.distributed: ``get_rank()`` and ``get_world_size()`` are this
    rank's there, and collectives run over it where the code gives no group. In the backward of such a collective, too,
    which on a GPU runs in a thread of torch's: so this holds for all threads but :class:`ThreadApart`. Where code gives
    another group, torch's ``get_rank(group)`` is wrong meanwhile; ``group.rank()`` is right."""
    world: Any = c10d._world
    world.__class__ = _World
    before, world.instead = world.instead, group
    try:
        yield
    finally:
        world.instead = before


def abort_groups() -> None:
    """Leave all groups in the middle of what they do. To destroy NCCL's would wait for messages that may never come
    (https://github.com/pytorch/pytorch/pull/141510)."""
    c10d._abort_process_group()


def default_store() -> Store:
    """The store over which the processes of the default group met. torch gives no other access to it where somebody
    else made the group."""
    return c10d._get_default_store()


class CommonScaler(ShardedGradScaler):
    """A loss scaler with which all ranks skip a step if the gradients of one overflow. torch's own shares this when it
    unscales gradients; a fused optimizer unscales them itself, after this private method has looked at them."""

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        for is_infinite in found.values():
            dist.all_reduce(is_infinite, dist.ReduceOp.MAX, self.process_group)
        return found


def forget_meshes() -> None:
    """Forget the device meshes that DTensor's caches of operators hold. They name process groups. If these have been
    destroyed, a DTensor of an equal mesh would still use them, or others of the same name."""
    _clear_sharding_prop_cache()


@contextmanager
def values_read_by(read: Callable[[DTensor], Any]) -> Iterator[None]:
    """Inside, ``read`` gives Python the value of a DTensor (:data:`VALUE_OF`). torch reads what this rank has of it:
    of a norm or a sum, the one over its own part. Only the operators' private table of exceptions can change that."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = handlers.get(VALUE_OF)
    handlers[VALUE_OF] = lambda operator, args, kwargs: read(args[0])
    try:
        yield
    finally:
        if before is None:
            del handlers[VALUE_OF]
        else:
            handlers[VALUE_OF] = before
