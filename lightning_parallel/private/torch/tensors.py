"""Private names of torch about tensors, operators and nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Names that others import from here.
# Running layers without memory and without arithmetic, for what autograd would save. Its module isn't public.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.checkpoint import metadata
from torch.distributed.tensor import DTensor

# Walking nested containers. torch has no public pytree; transformers registers its outputs with this one.
from torch.utils import _pytree as pytree

# Observing operators (recipes/traffic.py). Named as public by torch's own documentation, but its module is not.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

T = TypeVar("T", bound=Tensor)

# Most of what is in a container: not containers themselves.
_LEAVES = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})

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

# Inside, functions on a tensor subclass don't go through its `__torch_function__`: for that method itself, and for
# reading a shape without the detour.
subclass_functions_disabled = torch._C.DisableTorchFunctionSubclass

# Inside, an operation on a tensor subclass doesn't go through its `__torch_dispatch__`: for operations that change a
# tensor's shape in place, whose result has to be that very tensor.
dispatch_disabled = torch._C._DisableTorchDispatch

# Called with True or False: do profilers record this thread's operations from now on? torch has nothing public for it.
record_operations = torch._C._autograd._enable_record_function


def tree_leaves(value: Any) -> list[Any]:
    """The leaves of a nested container, in order. torch's walk has the same result, and takes six times as long for
    tuples, lists and dictionaries."""
    leaves: list[Any] = []
    _add_leaves(value, leaves)
    return leaves


def _add_leaves(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES or issubclass(kind, Tensor):
        leaves.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            _add_leaves(item, leaves)
    elif kind is dict:
        for item in value.values():
            _add_leaves(item, leaves)
    else:
        leaves += pytree.tree_leaves(value)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """A nested container with what a function makes of its leaves. For torch's walk see :func:`tree_leaves`."""
    kind = type(value)
    if kind in _LEAVES or issubclass(kind, Tensor):
        return function(value)
    if kind is tuple:
        return tuple([tree_map(function, item) for item in value])
    if kind is list:
        return [tree_map(function, item) for item in value]
    if kind is dict:
        return {name: tree_map(function, item) for name, item in value.items()}
    return pytree.tree_map(function, value)


def flat_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves and the structure of a function's arguments. For most operators it is a matter of their number."""
    if not kwargs and all(type(value) in _LEAVES or isinstance(value, Tensor) for value in args):
        return [*args], _structure_of(len(args))
    return tree_flatten((args, kwargs))


@cache
def _structure_of(count: int) -> Any:
    return tree_flatten(((None,) * count, {}))[1]


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
    """Is it the error of code in C++ that needs the memory of a tensor without any? Only the text shows it."""
    return "erroneously tracing into a custom kernel" in str(error)


def make_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of a subclass. nn.Parameter sets this attribute on
    subclasses that it wraps, but it can't wrap a tensor without memory."""
    tensor._is_param = True  # type: ignore[attr-defined]


def written_arguments(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to. Only its schema has them."""
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


@cache  # to read the schema takes longer than most operations on the meta device
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
    dropout and a recurrent layer in evaluation. Only the schema has the argument that decides."""
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
