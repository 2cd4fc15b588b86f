"""Splitting batches and joining what microbatches return."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_parallel.batch import batch_size, fingerprint, mapped, rebuilt, sizes, split, tensors
from lightning_parallel.batch_joins import join_outputs, weighted_mean


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    image: Tensor
    meta: dict[str, Any]
    scale: float = 1.0


@dataclasses.dataclass
class Computed:
    x: Tensor
    calls: int = 0
    total: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.calls += 1
        self.total = self.x * 2


@pytest.mark.parametrize(("n", "count"), [(3, 4), (3, 0), (0, 1)])
def test_empty_microbatches_are_refused(n: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{n} samples can't be split into {count} microbatches"):
        sizes(n, count)


@pytest.mark.parametrize("batch", [
    torch.zeros(6, 2),
    (torch.zeros(6), torch.zeros(6, 3)),
    [{"x": torch.zeros(6), "n": torch.tensor(3)}, "name"],
    Pair(torch.zeros(6), torch.zeros(6)),
    Sample(torch.zeros(6, 1), {"id": torch.arange(6)}),
    collections.OrderedDict(x=torch.zeros(6)),
    BatchEncoding({"input_ids": torch.zeros(6, 4)}),
    CausalLMOutput(logits=torch.zeros(6, 4)),
])  # fmt: skip
def test_batch_size_is_dimension_0_in_any_nesting(batch: Any) -> None:
    assert batch_size(batch) == 6
    parts = split(batch, 4)
    assert [batch_size(part) for part in parts] == [2, 2, 1, 1]
    assert all(type(part) is type(batch) for part in parts)


def test_tensors_that_disagree_are_named() -> None:
    batch = (Sample(torch.zeros(4, 2), {"id": torch.zeros(3)}), {"mask": [torch.zeros(4)]})
    with pytest.raises(ValueError) as caught:
        batch_size(batch)
    for part in ("batch[0].image has 4", "batch[0].meta['id'] has 3", "batch[1]['mask'][0] has 4"):
        assert part in str(caught.value)


class Graphs:
    """A batch that its own class splits, as torch_geometric's does."""

    def __init__(self, graphs: list[Tensor]) -> None:
        self.nodes = torch.cat(graphs)
        self.counts = [len(graph) for graph in graphs]

    def to_data_list(self) -> list[Tensor]:
        return list(self.nodes.split(self.counts))

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> Graphs:
        return cls(graphs)

    def apply(self, function: Any) -> Graphs:
        self.nodes = function(self.nodes)
        return self

    def to(self, device: Any) -> Graphs:
        return self.apply(lambda tensor: tensor.to(device))


def test_batches_of_graphs_are_split_by_their_class() -> None:
    batch = {"graphs": Graphs([torch.ones(n) * n for n in (2, 1, 3)]), "y": torch.arange(3)}
    assert batch_size(batch) == 3
    first, second = split(batch, 2)
    assert first["graphs"].nodes.tolist() == [2, 2, 1] and second["graphs"].nodes.tolist() == [3, 3, 3]
    assert [tensor.tolist() for tensor in tensors(second)] == [[3, 3, 3], [2]]
    copy = rebuilt(batch, torch.clone)
    copy["graphs"].nodes.zero_()
    assert batch["graphs"].nodes.sum() == 14  # type: ignore[attr-defined]
    # As torch_geometric's loader makes of pairs of graphs with a label.
    graphs = [torch.ones(n) * n for n in (2, 1, 3)]
    pairs = [Graphs(graphs), Graphs(graphs[::-1]), torch.arange(3)]
    assert batch_size(pairs) == batch_size(pairs[:2]) == 3
    one, other, y = split(pairs, 3)[0]
    assert one.nodes.tolist() == [2, 2] and other.nodes.tolist() == [3, 3, 3] and y.tolist() == [0]


class Opaque:
    def __init__(self) -> None:
        self.nodes = torch.ones(4)


def test_a_list_of_objects_is_of_samples_and_an_object_has_tensors_of_its_own() -> None:
    batch = [Opaque(), Opaque()]
    assert split((batch, torch.ones(2)), 2)[1][0] == batch[1:]
    copy = rebuilt(batch[0], torch.clone)
    copy.nodes.zero_()
    assert batch[0].nodes.sum() == 4


class CountedDict(dict[str, Tensor]):
    """As a TensorDict: a mapping that takes no tensors of another number of samples."""

    batch_size = (4,)

    def to(self, device: Any) -> CountedDict:
        return self

    def __setitem__(self, name: str, value: Tensor) -> None:
        raise RuntimeError("batch dimension mismatch")


@pytest.mark.parametrize(("batch", "words"), [
    *((batch, "no tensor that could be split") for batch in (None, "text", [], {"n": torch.tensor(1)})),
    ((pack_sequence([torch.zeros(2), torch.zeros(1)]), torch.zeros(2)), "pack them in training_step"),
    *((kind((Opaque(), torch.ones(4))), r"batch\[0\] is an object that can't be split") for kind in (tuple, list)),
    ({"inputs": CountedDict(x=torch.zeros(4, 2))}, r"batch\['inputs'\]"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(batch, 2)


def test_a_mapping_that_counts_its_samples_is_an_object() -> None:
    batch = {"inputs": CountedDict(x=torch.zeros(4, 2))}
    assert mapped(batch, torch.clone)["inputs"] is batch["inputs"]


def test_a_change_in_place_leaves_the_graphs_of_others_and_a_batch_with_gradient_keeps_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    first, second = split(torch.ones(4, 2), 2)
    loss = (first * weight).sum()  # saves `first`
    second.mul_(3)
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
    x = torch.ones(4, requires_grad=True)
    sum(part.sum() * (k + 1) for k, part in enumerate(split(x, 2))).backward()
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(("samples", "value", "first", "second"), [
    (3, ["a", "b", "c"], ["a", "b"], ["c"]),
    (3, ("a", "b", "c"), ("a", "b"), ("c",)),
    (3, [[1], [2, 3], []], [[1], [2, 3]], [[]]),
    (5, (1, 2, 3, 4, 0.5), (1, 2, 3), (4, 0.5)),  # as a collate function zips
    (5, ({"id": 1}, {"id": 2}, {"id": 3}, None, {}), ({"id": 1}, {"id": 2}, {"id": 3}), (None, {})),
    (5, np.arange(5), np.arange(3), np.arange(3, 5)),
    *(
        (3, value, value, value)  # a size, what isn't of samples, and empty containers
        for value in ((224, 224, 3), ["p", "q"], True, {}, [], (), np.zeros(2))
    ),
])  # fmt: skip
def test_lists_of_one_thing_a_sample_are_split_and_others_repeated(
    samples: int, value: Any, first: Any, second: Any
) -> None:
    parts = [part["value"] for part in split({"x": torch.zeros(samples, 1), "value": value}, 2)]
    assert [type(part) for part in parts] == [type(value)] * 2
    np.testing.assert_equal(parts, [first, second])


def test_a_dataclass_is_not_built_anew() -> None:
    parts = split(Computed(torch.arange(4)), 2)
    assert [part.calls for part in parts] == [1, 1]
    assert [part.total.tolist() for part in parts] == [[0, 2], [4, 6]]


def test_objects_of_transformers_stay_what_they_are() -> None:
    batch: Any = BatchEncoding({"input_ids": torch.arange(3)})
    batch._encodings = ["e0", "e1", "e2"]
    first, second = split(batch, 2)
    assert first._encodings == ["e0", "e1"] and second._encodings == ["e2"]
    assert second.input_ids.tolist() == [2] and batch["input_ids"].tolist() == [0, 1, 2]
    second = split(CausalLMOutput(logits=torch.arange(4)), 2)[1]
    assert second.logits.tolist() == second["logits"].tolist() == [2, 3]


def test_a_mean_leaves_out_what_does_not_count_and_is_taken_in_float32() -> None:
    assert join_outputs([None, None], [2, 1]) is None
    assert join_outputs([torch.tensor(1.0), None, torch.tensor(4.0)], [2, 2, 1]).item() == pytest.approx(2.0)
    joined = join_outputs([torch.tensor(1.0).bfloat16(), torch.tensor(1.0078125).bfloat16()], [1, 1])
    assert joined.dtype == torch.float32 and joined.item() == 1.00390625
    assert weighted_mean([torch.tensor(2.0), torch.tensor(torch.nan)], [3, 0]).item() == 2.0


def test_a_rebuilt_batch_has_the_same_tensors_in_containers_of_its_own() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    batch = {"x": torch.ones(2), "more": [torch.zeros(1), "name"], "packed": packed}
    again = rebuilt(batch)
    assert again is not batch and again["more"] is not batch["more"]
    assert isinstance(again["packed"], PackedSequence) and again["packed"].data is packed.data
    assert again["x"] is batch["x"] and again["more"][1] == "name"
    cloned = rebuilt(batch, torch.clone)
    assert cloned["x"] is not batch["x"] and torch.equal(cloned["x"], batch["x"])


def test_parts_of_a_tensor_carry_what_it_carries() -> None:
    class Labelled(Tensor):
        pass

    batch = torch.ones(3, 2).as_subclass(Labelled)
    batch.labels = ["a", "b"]  # type: ignore[attr-defined]
    parts = split({"x": batch}, 2)
    assert [part["x"].labels for part in parts] == [["a", "b"]] * 2 and [len(part["x"]) for part in parts] == [2, 1]


def test_sparse_tensors_have_the_fingerprint_of_their_values() -> None:
    dense = torch.eye(3)
    assert fingerprint([dense.to_sparse()]) == fingerprint([dense]) != fingerprint([2 * dense.to_sparse()])
