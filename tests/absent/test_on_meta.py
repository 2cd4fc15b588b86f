"""Results of operations without values: remembered, the same as worked out anew, and never shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.absent.on_meta import Argument, computed_on_meta, meta_of
from lightning_parallel.private.torch import tree_flatten

aten = torch.ops.aten
X = torch.ones(3, 4)


def computed(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return computed_on_meta(func, *tree_flatten((args, kwargs)))[0]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (X, X.t())),
        (aten.sum.dim_IntList, (X, [0])),
        (aten.cat.default, ([X, X], 1)),
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5)),
        (aten._to_copy.default, (X.bfloat16(),)),
        (aten.mul.Tensor, (X, 2.0)),
        (aten.mul.Tensor, (X.long(), 2.0)),
        (aten.add.Tensor, (X.to_sparse(), X.to_sparse())),
    ],
)
def test_a_result_has_the_shape_strides_and_dtype_of_the_real_one(func: Any, args: Any) -> None:
    real = [x for x in tree_flatten(func(*args))[0] if isinstance(x, Tensor)]
    for _ in range(2):  # the second time remembered
        found = [x for x in computed(func, *args) if isinstance(x, Tensor)]
        for one, other in zip(found, real, strict=True):
            assert one.is_meta and one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout
            assert one.layout is not torch.strided or one.stride() == other.stride()


def test_equal_numbers_of_other_types_are_told_apart() -> None:
    assert computed(aten.mul.Tensor, X.long(), 1)[0].dtype == torch.int64
    assert computed(aten.mul.Tensor, X.long(), 1.0)[0].dtype == torch.float32
    assert computed(aten.mul.Tensor, X.long(), True)[0].dtype == torch.int64


def test_what_is_written_in_place_is_told_as_the_argument() -> None:
    assert computed(aten.add_.Tensor, X, 1) == [Argument(0)]


def test_an_error_is_raised_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            computed(aten.mm.default, X, X)


def test_meta_of_keeps_what_is_no_tensor() -> None:
    assert meta_of(3) == 3 and meta_of(X.t()).stride() == (1, 4)
