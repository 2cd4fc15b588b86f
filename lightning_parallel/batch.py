"""Splits batches into microbatches or replicas' shares, and walks through them.

A batch is any nesting of tuples, lists, mappings and dataclasses that holds tensors. The samples lie along dimension 0
of every tensor. Named tuples, ``transformers.BatchEncoding`` and ``ModelOutput`` keep their types. Batches of graphs,
as torch_geometric makes them, are split by their own class::

    {"ids": [5, T], "mask": [5, T], "name": [5 strings]}   split into 2

        {"ids": [3, T], "mask": [3, T], "name": [3 strings]}
        {"ids": [2, T], "mask": [2, T], "name": [2 strings]}
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from numbers import Real
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_parallel.batch_objects import copied, is_graphs, is_opaque, split_graphs, tensors_of_graphs

_LONGEST_SIZE = 4  # numbers: of a video


def sizes(n: int, count: int) -> list[int]:
    """The sizes of ``count`` microbatches of ``n`` samples. They differ by at most one; the larger ones come first.

    Raises:
        ValueError: a microbatch would have no sample.
    """
    if not 1 <= count <= n:
        raise ValueError(
            f"{n} samples can't be split into {count} microbatches: each needs at least one sample. Use between 1 and "
            f"{n} microbatches, or a larger batch."
        )
    small, large = divmod(n, count)
    return [small + 1] * large + [small] * (count - large)


def batch_size(batch: Any) -> int:
    """The number of samples: the size of dimension 0, in which all tensors of the batch must agree.

    Tensors without dimensions don't count.

    Raises:
        ValueError: the batch holds no tensor with a dimension, tensors of different sizes, which are named, or an
            object that can't be split.
    """
    found: int | None = None
    for path, size in _named_sizes(batch, "batch"):
        if size is None:
            raise ValueError(f"{path} is an object that can't be split: nothing tells where its samples are.")
        if found is not None and size != found:
            named = ", ".join(f"{path} has {size}" for path, size in _named_sizes(batch, "batch"))
            raise ValueError(
                f"The tensors of the batch disagree about the number of samples (dimension 0): {named}. Give every "
                f"tensor of the batch its samples along dimension 0."
            )
        found = size
    if found is None:
        raise ValueError(
            f"The batch, a {type(batch).__name__}, holds no tensor that could be split along dimension 0: it has to be "
            f"nested tuples, lists, dicts or dataclasses of tensors."
        )
    return found


def samples_of(batch: Any) -> int | None:
    """The number of samples in a batch; None if its samples don't lie along dimension 0 of all tensors."""
    try:
        return batch_size(batch)
    except ValueError:
        return None


def split(batch: Any, count: int) -> list[Any]:
    """The batch as ``count`` batches of the sizes that :func:`sizes` gives. Tensors are views; nothing is copied.

    Tensors are split along dimension 0. So are lists and tuples of other things that are as long as the batch, as
    collate functions make them, and NumPy's arrays of that length. All else is repeated in every part: tensors without
    dimensions, numbers, None, and a tuple of up to four numbers, which is a size.

    Raises:
        ValueError: as :func:`batch_size` and :func:`sizes`.
    """
    return split_into(batch, sizes(batch_size(batch), count))


def split_into(node: Any, lengths: Sequence[int]) -> list[Any]:
    """The batch as batches of these sizes, as :func:`split` divides it. Their sum is the batch's size."""
    if isinstance(node, Tensor):
        if not node.dim():
            return [node] * len(lengths)
        pieces: Sequence[Tensor] = torch.split(node, [*lengths])
        # `.data` gives each view a version counter of its own: a step that changes its microbatch in place must not
        # invalidate what autograd has saved of the others.
        pieces = pieces if node.requires_grad else [piece.data for piece in pieces]
        for piece in pieces:
            for name, value in vars(node).items():
                vars(piece).setdefault(name, value)  # what a subclass carries and doesn't divide by itself
        return list(pieces)
    if one_per_sample(node, sum(lengths)) or _zipped(node, sum(lengths)):
        return _slices(node, lengths)
    children = members(node)
    if children is None:
        return split_graphs(node, lengths) if is_graphs(node) else [node] * len(lengths)
    keys, values = children
    parts = [split_into(value, lengths) for value in values]
    if not parts:
        return [node] * len(lengths)
    result = [rebuild(node, keys, row) for row in zip(*parts, strict=True)]
    # The tokenizer's own record of the samples, which a BatchEncoding keeps beside its tensors.
    encodings = getattr(node, "_encodings", None)
    if isinstance(encodings, list) and len(encodings) == sum(lengths):
        for part, piece in zip(result, _slices(encodings, lengths), strict=True):
            part._encodings = piece
    return result


def rebuilt(batch: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """The same batch in new containers, so that what a step puts into them stays in that run of the step. ``tensor``
    makes the new batch's tensors from the old one's."""
    return mapped(batch, tensor, anew=True)


def cloned(batch: Any) -> Any:
    """The same batch in new containers, with copies of its tensors. Those of a subclass make their own."""
    return rebuilt(batch, methodcaller("clone"))


def fingerprint(batch: Any) -> str:
    """A hash of the batch's tensors: batches with different tensors have different ones."""
    digest = hashlib.blake2b()
    for tensor in tensors(batch):
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        digest.update(dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- walking through a batch -------------------------------------------------------------------------------------


def tensors(node: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(node, Tensor):
        yield node
        return
    children = members(node)
    if children is not None:
        for child in children[1]:
            yield from tensors(child)
    elif is_graphs(node):
        yield from tensors_of_graphs(node)


def mapped(node: Any, function: Callable[[Tensor], Tensor], *, anew: bool = False) -> Any:
    """The batch with ``function`` applied to its tensors. Containers in which nothing changes stay the same objects,
    unless all are to be made ``anew``, with other objects that hold tensors."""
    if isinstance(node, Tensor):
        return function(node)
    children = members(node)
    if children is None:
        return copied(node, function) if is_graphs(node) or (anew and is_opaque(node)) else node
    keys, values = children
    changed = [mapped(value, function, anew=anew) for value in values]
    if not anew and all(new is old for new, old in zip(changed, values, strict=True)):
        return node
    return rebuild(node, keys, changed)


def members(node: Any) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """Keys and values of a container; None for anything else. :func:`rebuild` puts other values into one like it."""
    # A TensorDict is a mapping, but knows its number of samples, and takes no tensors of another number.
    if type(node) is dict or (isinstance(node, Mapping) and not hasattr(node, "batch_size")):
        return list(node), list(node.values())
    if isinstance(node, tuple | list):
        return range(len(node)), node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return names, [getattr(node, name) for name in names]
    return None


def rebuild(node: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """A container like ``node`` with other values. A dataclass's ``__init__`` and ``__post_init__`` don't run."""
    if isinstance(node, MutableMapping):  # first: a ModelOutput is a dataclass too, and keeps both in step
        result = copy.copy(node)
        for key, value in zip(keys, values, strict=True):
            result[key] = value
        return result
    if isinstance(node, Mapping):
        return type(node)(dict(zip(keys, values, strict=True)))  # type: ignore[call-arg]
    if isinstance(node, tuple) and hasattr(node, "_make"):
        return node._make(values)
    if isinstance(node, tuple | list):
        return type(node)(values)
    result = copy.copy(node)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(result, key, value)  # frozen ones too
    return result


def _is_object(node: Any) -> bool:
    return not isinstance(node, Tensor) and members(node) is None and is_opaque(node)


def _named_sizes(node: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """The path of each tensor, as the user would write it, and its size; None for what can't be split."""
    if isinstance(node, Tensor):
        if node.dim():
            yield path, node.shape[0]
        return
    if isinstance(node, PackedSequence):
        raise ValueError(
            f"{path} is a PackedSequence, which can't be split: its samples lie interleaved. Put the padded tensor and "
            f"the lengths into the batch, and pack them in training_step."
        )
    children = members(node)
    if children is None:
        if is_graphs(node):
            yield path, len(node.to_data_list())
        elif is_opaque(node):
            yield path, None
    elif type(node) is list and one_per_sample(node, len(node)) and any(_is_object(each) for each in node):
        yield path, len(node)  # an object for each sample
    else:
        attributes = not isinstance(node, Mapping | tuple | list)
        for key, child in zip(*children, strict=True):
            yield from _named_sizes(child, f"{path}.{key}" if attributes else f"{path}[{key!r}]")


def one_per_sample(node: Any, n: int) -> bool:
    """Is it a list of things without tensors, or a tuple of texts, one for each of ``n`` samples?"""
    if type(node) is list and len(node) == n:
        return not any(_holds_tensor(value) for value in node)
    return type(node) is tuple and len(node) == n and all(isinstance(value, str) for value in node)


def _zipped(node: Any, n: int) -> bool:
    """Is it one of what ``zip(*samples)`` gives, or an array of NumPy's, with an item for each sample?"""
    if isinstance(node, np.ndarray):
        return node.shape[:1] == (n,)
    if type(node) is not tuple or len(node) != n or any(_holds_tensor(value) for value in node):
        return False
    return n > _LONGEST_SIZE or not all(isinstance(value, Real) for value in node)


def _holds_tensor(node: Any) -> bool:
    return next(tensors(node), None) is not None


def _slices(node: Any, lengths: Sequence[int]) -> list[Any]:
    ends = accumulate(lengths)
    return [node[end - length : end] for length, end in zip(lengths, ends, strict=True)]
