"""What replicas return, joined into what the whole batch would have given."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from lightning_parallel.local_replicas.join import joined as joined_on

CPU = torch.device("cpu")
Point = namedtuple("Point", "x y")


def joined(*outputs: Any, samples: tuple[int, ...] = (2, 1)) -> Any:
    return joined_on(outputs, samples, CPU)


def test_rows_are_concatenated_and_numbers_weighted_by_samples() -> None:
    assert joined(torch.tensor([1, 2]), torch.tensor([3])).tolist() == [1, 2, 3]
    assert joined(torch.tensor(3.0), torch.tensor(6.0)) == 4
    assert joined(3.0, 6.0) == 4
    assert joined(5, 5) == 5 and joined(True, True) is True


def test_structures_keep_their_types() -> None:
    first, second = torch.ones(2, 3), torch.zeros(1, 3)
    output = joined(CausalLMOutput(logits=first), CausalLMOutput(logits=second))
    assert isinstance(output, CausalLMOutput) and output.logits.shape == (3, 3) and output.loss is None
    output = joined({"a": [first, Point(first, 1.0)]}, {"a": [second, Point(second, 4.0)]})
    assert output["a"][0].shape == (3, 3) and output["a"][1].x.shape == (3, 3) and output["a"][1].y == 2


def test_gradients_go_back_through_it() -> None:
    rows = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    losses = [torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)]
    both = joined(*({"rows": r, "loss": loss} for r, loss in zip(rows, losses, strict=True)))
    (both["rows"].sum() + both["loss"]).backward()
    assert [tensor.grad.tolist() for tensor in rows] == [[1, 1], [1]]
    assert [float(tensor.grad) for tensor in losses] == pytest.approx([2 / 3, 1 / 3])


def test_lists_with_a_thing_for_each_sample_are_concatenated() -> None:
    assert joined(["a", "b"], ["c"]) == ["a", "b", "c"]
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (5, 0, 3)]
    assert joined(boxes[:2], boxes[2:]) == boxes
    same_length = joined_on([boxes[:1], boxes[1:2]], [1, 1], CPU)
    assert [len(each["boxes"]) for each in same_length] == [5, 0]


def test_lists_of_layers_are_not_taken_for_lists_of_samples() -> None:
    layers = [[torch.full((2, 3), float(layer)) for layer in range(2)] for _ in range(2)]
    assert [each.shape for each in joined_on(layers, [2, 2], CPU)] == [(4, 3), (4, 3)]


def test_none_is_joined_with_none_alone_and_other_things_are_those_of_replica_0() -> None:
    assert joined(None, None) is None
    with pytest.raises(ValueError, match="1 of 2 replicas"):
        joined(None, torch.tensor(2.0))
    things = [object(), object()]
    assert joined({"cache": things[0]}, {"cache": things[1]})["cache"] is things[0]


@pytest.mark.parametrize(("outputs", "words"), [
    (({"m": torch.zeros(5, 5)}, {"m": torch.zeros(5, 5)}), ["['m']", "(5, 5), (5, 5) for 2, 1 samples", "dimension 0"]),
    ((torch.zeros(2), torch.zeros(())), ["(2,), ()"]),
    (({"a": 1}, {"b": 1}), ["the output has ['a'], ['b']"]),
    ((torch.zeros(2), "text"), ["differ"]),
])  # fmt: skip
def test_what_cannot_be_joined_is_named(outputs: tuple[Any, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        joined(*outputs)
    assert all(word in str(caught.value) for word in words), caught.value


def test_sixteen_bit_losses_are_averaged_in_float32() -> None:
    total: Tensor = joined(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
