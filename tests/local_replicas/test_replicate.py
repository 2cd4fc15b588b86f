"""Replicas: copies of everything but the weights' memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_parallel.local_replicas.replicate import added, replicate

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.norm = nn.BatchNorm1d(3)
        self.recurrent = nn.GRU(3, 3, batch_first=True)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count = self.count + 1
        hidden, _ = self.recurrent(self.norm(self.first(x)).unsqueeze(1))
        return self.tied(hidden[:, 0]) * self.frozen


def test_parameters_share_the_model_s_memory_and_its_graph() -> None:
    net = Net()
    first, *others = replicate(net, [CPU] * 3)
    assert first is net and len(others) == 2
    for replica in others:
        assert [p.data_ptr() for p in replica.parameters()] == [p.data_ptr() for p in net.parameters()]
        assert [p.requires_grad for p in replica.parameters()] == [p.requires_grad for p in net.parameters()]
        assert not {id(p) for p in replica.parameters()} & {id(p) for p in net.parameters()}
        assert dict(replica.named_parameters()).keys() == dict(net.named_parameters()).keys()
        replica(torch.randn(4, 3)).sum().backward(retain_graph=True)
    assert all((p.grad is not None) == p.requires_grad for p in net.parameters())


def test_what_is_shared_in_the_model_is_shared_in_the_replica() -> None:
    _, replica = replicate(Net(), [CPU] * 2)
    assert replica.first is replica.again
    assert replica.first.weight is replica.tied.weight
    assert len([*replica.parameters()]) == len([*Net().parameters()])


def test_the_model_keeps_what_replica_0_changes() -> None:
    net = Net()
    first, second = replicate(net, [CPU] * 2)
    batches = [torch.randn(8, 3), torch.randn(8, 3) + 5]
    first(batches[0])
    second(batches[1])
    second(batches[1])
    expected = nn.BatchNorm1d(3)
    expected(net.first(batches[0]))
    assert net.calls == 1 and net.count == 1 and net.norm.num_batches_tracked == 1
    assert torch.allclose(net.norm.running_mean, expected.running_mean)
    assert second.norm.num_batches_tracked == 2


def test_without_gradients_replicas_have_none() -> None:
    with torch.no_grad():
        _, replica = replicate(Net(), [CPU] * 2)
    assert not any(p.requires_grad for p in replica.parameters())


def test_parametrized_modules_are_replicated() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    _, replica = replicate(layer, [CPU] * 2)
    x = torch.randn(3, 2)
    assert torch.equal(replica(x), layer(x))
    replica(x).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


def test_attributes_of_parameters_come_along() -> None:
    net = nn.Linear(1, 1)
    net.weight.decay = 0.1
    assert replicate(net, [CPU] * 2)[1].weight.decay == 0.1


@pytest.mark.parametrize(("model", "words"), [
    (nn.Sequential(torch.jit.script(nn.ReLU())), "0 is scripted"),
    (nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")), "0 is compiled"),
    (nn.Sequential(nn.LazyLinear(2)), "0.weight has no shape yet"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_copied_is_refused_by_name(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replicate(model, [CPU] * 2)


def test_gradients_are_added_in_the_order_of_the_replicas() -> None:
    values = [1e16, 1.0, -1e16]  # in float64, the sum depends on the order
    gradients = [torch.tensor(value, dtype=torch.float64) for value in values]
    assert added(gradients, CPU) == sum(values)
    assert added([None, torch.ones(())], CPU) == 1 and added([None, None], CPU) is None


def test_a_sum_leaves_what_it_adds() -> None:
    part = torch.ones(2)
    added([part, part, part], CPU)
    assert part.tolist() == [1, 1]


@pytest.mark.gpu
def test_gpus_get_copies_and_give_gradients_back() -> None:
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    net = Net().to(devices[0])
    replicas = replicate(net, devices)
    for replica, device in zip(replicas, devices, strict=True):
        assert {tensor.device for tensor in (*replica.parameters(), *replica.buffers())} == {device}
    ones = [torch.ones(2, device=device) for device in devices]
    total = added(ones, devices[0])
    assert total is not None and total.tolist() == [len(devices)] * 2 and total.device == devices[0]
