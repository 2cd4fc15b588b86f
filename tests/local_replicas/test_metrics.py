"""Metrics in replicas: one state, updated in the order of the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.local_replicas.data_parallel import on_replicas

CPUS = [torch.device("cpu")] * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.all = CatMetric()
        self.several = MetricCollection({"mean": MeanMetric(), "again": CatMetric()})
        self.by_name = nn.ModuleDict({"accuracy": MulticlassAccuracy(3)})


def test_updates_come_in_the_order_of_the_samples() -> None:
    net = Net()

    def step(replica: Any, share: Any) -> None:
        replica.all.update(share.batch)
        replica.several(share.batch)

    for _ in range(3):
        on_replicas(step, net, torch.arange(7.0), CPUS)
    assert net.all.compute().tolist() == [*map(float, range(7))] * 3
    assert net.several["again"].compute().tolist() == [*map(float, range(7))] * 3
    assert net.several.compute()["mean"] == 3


def test_a_metric_s_forward_returns_the_share_s_value() -> None:
    values = []
    on_replicas(
        lambda r, s: values.append(r.by_name["accuracy"](s.batch, s.batch)), Net(), torch.tensor([0, 1, 2]), CPUS
    )
    assert [float(value) for value in values] == [1, 1, 1]


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
    net = nn.ModuleDict({"one": Devices(), "many": MetricCollection([Devices()])}).to("meta")

    def step(replica: Any, share: Any) -> None:
        for metric in (replica["one"], replica["many"]):
            metric.update(torch.ones(1), weights=torch.ones(1, device=share.device))
            metric(torch.ones(1), weights=torch.ones(1, device=share.device))

    on_replicas(step, net, torch.ones(2, device="meta"), [torch.device("meta")] * 2)
    for metric in (net["one"], net["many"]["Devices"]):
        assert metric.update_count == 4 and set(metric.seen) == {"meta"}
        metric.update(torch.ones(1), weights=torch.ones(1))  # outside of a step it is itself again
        assert metric.seen[-1] == "cpu"
