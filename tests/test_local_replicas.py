"""Replicas in one process, in a plain PyTorch loop: the numbers of one model with the whole batch.

Gradients, errors, and dropout that is computed again, are shown in strategies/test_data_parallel.py.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torchmetrics import Metric, MetricCollection
from transformers.modeling_outputs import CausalLMOutput

from lightning_parallel.batch_joins import join_outputs
from lightning_parallel.local_replicas import on_replicas, replicate

CPU = torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_on_gpus_train_as_one_model(replicas: int) -> None:
    """Each on a GPU, or several on one."""
    gpus = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(replicas)]
    gradients = []
    for devices in (gpus, gpus[:1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(gpus[0], torch.float64)
        x = torch.linspace(0, 1, 28, device=gpus[0], dtype=torch.float64).view(7, 4)
        for _ in range(2):
            output = on_replicas(lambda replica, share: replica(share.batch), model, x, devices)
            output.pow(2).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*gradients, strict=True))


# -- what runs in a replica --------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.norm = nn.BatchNorm1d(3)
        self.recurrent = nn.GRU(3, 3, batch_first=True)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.tied.weight.decay = 0.1  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("none", None)
        self.squashed = nn.Linear(3, 3)
        parametrize.register_parametrization(self.squashed, "weight", nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.norm(self.first(x)).unsqueeze(1))
        return self.squashed(self.tied(hidden[:, 0]) * self.frozen)


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=str)
def test_a_replica_has_the_model_s_structure_and_its_graph(device: torch.device) -> None:
    """The meta device stands for another one."""
    model = Net()
    first, replica = replicate(model, [CPU, device])
    assert first is model and replica.first is replica.again
    assert replica.first.weight is replica.tied.weight and replica.tied.weight.decay == 0.1
    named = dict(model.named_parameters())
    assert dict(replica.named_parameters()).keys() == named.keys()
    assert all(p.device == device and p.requires_grad == named[n].requires_grad for n, p in replica.named_parameters())
    output = replica(torch.ones(4, 3, device=device))
    assert output.device == device and output.requires_grad
    if device == CPU:
        assert torch.equal(output, model(torch.ones(4, 3)))
        output.sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("model", "words"), [
    (nn.Sequential(torch.jit.script(nn.ReLU())), "0 is scripted"),
    (nn.Sequential(torch.compile(nn.ReLU(), backend="eager")), "0 is compiled"),
    (nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_refused_by_name(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replicate(model, [CPU] * 2)


# -- shares, and outputs joined ----------------------------------------------------------------------------------------


Point = namedtuple("Point", "x y")
BOXES = [{"boxes": torch.zeros(n, 4)} for n in (5, 0, 3)]
LAYERS = [[torch.full((2, 3), float(layer)) for layer in range(2)] for _ in range(2)]


def joined(*outputs: Any, samples: tuple[int, ...] = (2, 1)) -> Any:
    return join_outputs(outputs, samples, strict=True)


def test_outputs_are_joined_in_their_structures() -> None:
    first, second = torch.ones(2, 3), torch.zeros(1, 3)
    output = joined(CausalLMOutput(logits=first), CausalLMOutput(logits=second))
    assert isinstance(output, CausalLMOutput) and output.logits.shape == (3, 3) and output.loss is None
    output = joined({"a": [first, Point(first, 1.0)]}, {"a": [second, Point(second, 4.0)]})
    assert output["a"][0].shape == (3, 3) and output["a"][1].x.shape == (3, 3) and output["a"][1].y == 2
    things = [object(), object()]
    assert joined({"cache": things[0]}, {"cache": things[1]})["cache"] is things[0]
    assert joined(5, 5) == 5 and joined(True, True) is True and joined(None, None) is None


@pytest.mark.parametrize("strict", [False, True])
def test_lists_with_a_thing_for_each_sample_are_concatenated_unless_they_hold_layers(strict: bool) -> None:
    assert join_outputs([["a", "b"], ["c"]], [2, 1], strict=strict) == ["a", "b", "c"]
    for parts, counts in (([BOXES[:2], BOXES[2:]], [2, 1]), ([BOXES[:1], BOXES[1:2]], [1, 1])):
        found = join_outputs(parts, counts, strict=strict)
        assert [len(each["boxes"]) for each in found] == [5, 0, 3][: sum(counts)]
    assert [each.shape for each in join_outputs(LAYERS, [2, 2], strict=strict)] == [(4, 3), (4, 3)]


@pytest.mark.parametrize(("outputs", "words"), [
    (({"m": torch.zeros(5, 5)}, {"m": torch.zeros(5, 5)}), ["['m']", "(5, 5), (5, 5) for 2, 1 samples"]),
    ((torch.zeros(2), torch.zeros(())), ["(2,), ()"]),
    (({"a": 1}, {"b": 1}), ["the output has ['a'], ['b']"]),
    ((torch.zeros(2), "text"), ["differ"]),
    ((None, torch.tensor(2.0)), ["1 of 2 replicas"]),
])  # fmt: skip
def test_what_cannot_be_joined_is_named(outputs: tuple[Any, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        joined(*outputs)
    assert all(word in str(caught.value) for word in words), caught.value


class Devices(Metric):
    """Where its arguments were."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()))
        self.seen: list[str] = []

    def update(self, value: Tensor, *, weights: Tensor) -> None:
        self.seen += [value.device.type, weights.device.type]

    def compute(self) -> Tensor:
        return self.total


def test_arguments_come_to_the_metric_s_device() -> None:
    model: Any = nn.ModuleDict({"one": Devices(), "many": MetricCollection([Devices()])}).to("meta")

    def step(replica: Any, share: Any) -> None:
        for metric in (replica["one"], replica["many"]):
            metric.update(torch.ones(1), weights=torch.ones(1, device=share.device))
            metric(torch.ones(1), weights=torch.ones(1, device=share.device))

    on_replicas(step, model, torch.ones(2, device="meta"), [torch.device("meta")] * 2)
    for metric in (model["one"], model["many"]["Devices"]):
        assert metric.update_count == 4 and set(metric.seen) == {"meta"}
        metric.update(torch.ones(1), weights=torch.ones(1))  # outside of a step it is itself again
        assert metric.seen[-1] == "cpu"
