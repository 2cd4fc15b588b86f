"""What a plan ranks, refuses and says."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import plan
from lightning_parallel.comparison import timing
from lightning_parallel.costs import devices
from lightning_parallel.costs.devices import Device, described
from lightning_parallel.planning.layouts import Choice, choices, tensor_sizes, thriftier
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.seeding import random_state
from tools.faults.models import Blocks, Words
from tools.workers.pool import WorkerPool


class Sleeping(torch.autograd.Function):
    """Takes so many seconds forward, and twice as many backward."""

    sleep: ClassVar[Callable[[float], None]] = time.sleep

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Sleeping.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Sleeping.sleep(2 * ctx.seconds)
        return gradient, None


class OwnTime:
    """A clock that goes on where something sleeps, and by next to nothing each time that somebody looks: what is
    measured with it is the same on a busy machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-7
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are timed by a clock of this test's, and messages take no time."""
    clock = OwnTime()
    monkeypatch.setattr(Sleeping, "sleep", clock.sleep)
    monkeypatch.setattr(devices, "time", clock)
    monkeypatch.setattr(devices, "kept_waiting", lambda: 0.0)
    monkeypatch.setattr(devices, "over_gloo", lambda: (0.0, 1e12))
    monkeypatch.setattr(Device, "speed", lambda self, computing: 1.0)  # asleep, nobody needs a core


class Sleeper(nn.Module):
    """A layer that takes ``seconds`` for each sample, besides next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(x * self.weight, self.seconds * len(x))


class Halves(Sleeper):
    """Sleeps as long for the gradient of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds * len(x)
        return Sleeping.apply(x, seconds) * Sleeping.apply(self.weight, seconds)


class Layers(L.LightningModule):
    """One after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sleepers(*seconds: float) -> Layers:
    return Layers(*map(Sleeper, seconds))


def products() -> list[nn.Module]:
    return [nn.Linear(256, 256) for _ in range(4)]


# -- time ----------------------------------------------------------------------------------------------------------


SLEEP = 0.01  # seconds, by the clock of the tests


@pytest.mark.usefixtures("own_time")
def test_the_time_is_that_of_the_simulation_with_known_times() -> None:
    """Each layer sleeps for each sample, so each schedule takes what the simulator says."""
    rows = plan(sleepers(*[SLEEP] * 4), torch.randn(8, 4), devices=4).rows
    pipelines = [row for row in rows if row.choice.is_pipeline and not row.choice.is_late and row.choice.stages == 4]
    assert {row.strategy for row in pipelines} >= {"pipeline_gpipe", "pipeline_1f1b"}
    for row in pipelines:
        each = SLEEP * 8 / row.choice.microbatches
        known = simulate(row.choice.order().schedule, each, 2 * each)
        assert row.time.computing + row.time.waiting == pytest.approx(known.makespan, rel=0.02), row.choice
        assert row.time.bubble == pytest.approx(known.bubble, abs=0.02), row.choice
    assert not any("balance" in row.options for row in pipelines)  # the layers are equal
    by_count = {row.choice.microbatches: row.time.total for row in pipelines if row.strategy == "pipeline_1f1b"}
    assert by_count[8] < by_count[4]  # the bubble is smaller
    for row in (row for row in rows if row.strategy in ("ddp", "fully_sharded")):
        assert row.time.computing == pytest.approx(3 * 4 * SLEEP * 2, rel=0.02)


NAP = 0.003  # seconds, also where layers run
RUNS = 10  # at most, until one is undisturbed


def seconds(choice: Choice) -> float:
    """Of a step, on two ranks that sleep most of the time."""
    given = sleepers(*[NAP] * 4), torch.randn(8, 4), 2, {"accelerator": "cpu"}
    return timing.on_rank(choice.strategy, choice.options, *given).seconds


@pytest.mark.usefixtures("own_time")
def test_a_pipeline_takes_the_time_that_was_planned(pool: WorkerPool) -> None:
    """No run is shorter. Messages aren't planned, nor is what other programs take."""
    rows = plan(sleepers(*[NAP] * 4), torch.randn(8, 4), devices=2).rows
    row = next(each for each in rows if each.strategy == "pipeline_1f1b")
    for _ in range(RUNS):
        found = max(pool.run(seconds, 2, row.choice, init=False))
        if found < 1.5 * row.time.total:
            break
    assert 0.95 * row.time.total < found < 1.5 * row.time.total


@pytest.mark.usefixtures("own_time")
def test_halves_of_a_backward_are_timed() -> None:
    """A layer of a user's own function has all of it in the first half; of others a half begins there."""
    rows = plan(sleepers(*[0.005] * 4), torch.randn(8, 4), devices=2).rows
    asleep = next(row.chunks for row in rows if row.strategy == "pipeline_zbv")
    assert all(chunk.first > 0.9 for chunk in asleep[1:])
    halves = Layers(*(Halves(0.005) for _ in range(4)))
    found = next(row.chunks for row in plan(halves, torch.randn(8, 4), devices=2).rows if row.choice.is_pipeline)
    assert found[-1].first == pytest.approx(0.5, abs=1e-3)


@pytest.mark.usefixtures("own_time")
def test_cuts_are_moved_by_time() -> None:
    """By parameters the layers are equal."""
    rows = plan(sleepers(0.001, 0.001, 0.001, 0.003), torch.randn(8, 4), devices=2).rows
    for row in rows:
        if row.strategy == "pipeline_1f1b":
            assert row.options["balance"] == [3, 1]


class Pair(nn.Module):
    """With more parameters than all else, half of them in each part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(0.0005) for _ in range(2))
        for layer in self.layers:
            layer.more = nn.Parameter(torch.ones(4000))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.mark.usefixtures("own_time")
def test_cuts_are_moved_by_time_where_parameters_are_in_parts_of_a_layer() -> None:
    """By parameters the last layer is cut in two."""
    module = sleepers(0.003, 0.001, 0.001)
    module.layers.append(Pair())
    rows = plan(module, torch.randn(8, 4), devices=2).rows
    for row in rows:
        if row.strategy == "pipeline_1f1b":
            assert row.options["balance"] in ("operations", [1, 3])


# -- what there is, and what is refused ------------------------------------------------------------------------------


def test_layouts_fill_all_devices() -> None:
    found = {choice for tensor in tensor_sizes(4) for choice in choices(4, 16, tensor)}
    assert all(choice.stages * choice.data * choice.tensor == 4 for choice in found)
    assert Choice("pipeline_zbv", 2, 2, microbatches=4) in found
    assert Choice("pipeline_1f1b", 2, tensor=2, microbatches=4) in found
    assert {choice.data for choice in found if choice.strategy == "tensor_parallel"} == {1, 2}
    assert max(tensor_sizes(1024)) == 8  # a node
    assert max(len(choice.placement) for choice in choices(1024, 64, layers=80)) == 32  # chunks of two layers or more
    assert {choice.strategy for choice in choices(4, 3)} >= {"pipeline_1f1b"}
    assert not {"ddp", "fully_sharded"} & {choice.strategy for choice in choices(4, 3)}  # a replica has no sample
    in_a_v = {choice.strategy for choice in choices(2, 4) if choice.microbatches == 2 and choice.stages == 2}
    assert {"pipeline_zbv"} == in_a_v & {"pipeline_zbv", "pipeline_vhalf", "pipeline_vmin"}  # they have one list


def test_what_does_not_fit_is_tried_with_sharded_replicas_and_checkpointing() -> None:
    """They take no longer than whole ones, so what is run again comes after them."""

    def tried(choice: Choice) -> list[tuple[str, int, bool, bool]]:
        return [(each.strategy, each.stages, each.sharded, each.recompute) for each in thriftier(choice, 8)]

    name = "pipeline_1f1b"
    several = [(name, 2, True, False), (name, 2, False, True), (name, 2, True, True)]
    assert tried(Choice(name, 2, 2, microbatches=2)) == several
    assert tried(Choice(name, 2, microbatches=2)) == [(name, 2, False, True)]
    assert tried(Choice("pipeline_zbv", 2, 2, microbatches=2)) == [("pipeline_zbv", 2, False, True)]
    assert {*tried(Choice("tensor_parallel", data=2, tensor=2))} == {(name, 1, True, False), (name, 1, True, True)}
    assert not tried(Choice("fully_sharded", data=2))


def test_refusals_name_what_is_in_the_way() -> None:
    by_hand = Blocks()
    by_hand.automatic_optimization = False
    manual = plan(by_hand, Blocks.batches()[0], devices=2, device="h100")
    assert {row.strategy for row in manual.rows} == {"ddp", "fully_sharded", "tensor_parallel"}
    assert "automatic_optimization" in manual.refused["pipeline_1f1b, 2 stages"]
    tied = plan(Words(), Words.batches()[0], devices=2, device="h100")
    assert "embed.weight" in tied.refused["pipeline_async, 2 stages"]
    unpaired = plan(sleepers(0.0, 0.0), torch.randn(8, 4), devices=2, device="h100")
    assert "plan" in unpaired.refused["2 tensor ranks"]
    few = plan(sleepers(0.0, 0.0, 0.0), torch.randn(8, 4), devices=4, device="h100")
    assert "stages=4" in few.refused["pipeline_1f1b, 4 stages"]
    assert any(row.choice.stages == 2 for row in few.rows)
    normalised = plan(Layers(*products(), nn.BatchNorm1d(256)), torch.randn(8, 256), devices=2, device="h100")
    assert {"ddp", "fully_sharded", "pipeline_1f1b"} <= {row.strategy for row in normalised.found}


def test_late_gradients_are_never_taken_unasked_and_the_text_has_the_command() -> None:
    found = plan(Blocks(), Blocks.batches()[0], devices=2, device="h100")
    late = [row.choice.is_late for row in found.rows]
    assert late == sorted(late) and any(late)
    assert not found.best.choice.is_late and found.best.time.computing < 1e-3
    assert f"lp-train {' '.join(found.best.overrides)}" in str(found) == repr(found) and "data sheet" in str(found)
    assert found.best.overrides[0] == f"strategy={found.best.strategy}"


def test_what_does_not_fit_names_the_nearest_layout_and_what_fits_has_the_margin() -> None:
    found = plan(Blocks(), Blocks.batches()[0], devices=2, memory="1KiB", device="h100")
    assert not found.rows
    least = min(row.needed for row in found.found if not row.choice.is_late)
    with pytest.raises(ValueError, match="memory=1 KiB") as error:
        _ = found.best
    nearest = next(row for row in found.found if row.needed == least)
    assert str(nearest.choice) in str(error.value) and str(nearest.choice) in str(found)
    assert "NCCL's buffers 576 MiB" in str(error.value)  # most of it: DDP's only group
    sizes = sorted(row.needed for row in found.found)
    limit = f"{sizes[len(sizes) // 2] / 2**10:.3f}KiB"
    some = plan(Blocks(), Blocks.batches()[0], devices=2, memory=limit, device="h100")
    assert some.limit is not None and {row.needed <= some.limit for row in some.rows} == {True}
    assert len(some.rows) < len(some.found) and any(row.choice.recompute for row in some.found)


@pytest.mark.parametrize("wrong", [
    {"memory": "2 apples"}, {"device": "abacus"}, {"devices": 0}, {"measure": -1}, {"measure": 3, "device": "h100"},
    {"measure": 3, "devices": 4},  # this machine has one
], ids=str)  # fmt: skip
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: wrong.get("devices") == 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=", ".join(f"{name}={value!r}" for name, value in wrong.items())):
        plan(Blocks(), Blocks.batches()[0], **wrong)


# -- tensor ranks and large machines -----------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Pairs(Layers):
    """Four pairs of a column and a row, without memory."""

    def __init__(self) -> None:
        with torch.device("meta"):
            layers = [Wide(1024) for _ in range(4)]
        super().__init__(*layers)

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"layers.*.up": "column", "layers.*.down": "row"}


def test_a_pair_of_layers_sends_its_output_and_its_gradient() -> None:
    samples, width, ranks = 64, 1024, 4
    found = plan(Pairs(), torch.randn(samples, width), devices=ranks, device="h100")
    row = next(row for row in found.rows if row.strategy == "tensor_parallel" and row.choice.tensor == ranks)
    one = described("h100", halves=False).collective("all_reduce", 4 * samples * width, ranks)
    # The first pair's input needs no gradient.
    assert row.time.messages == pytest.approx(one * (4 + 3), rel=1e-6)
    assert row.memory.parameters == 4 * 8 * width**2 * 4 / ranks
    ddp = next(row for row in found.rows if row.strategy == "ddp")
    assert row.time.computing == pytest.approx(ddp.time.computing, rel=0.5)  # a quarter of the work, on all samples


def test_several_nodes_are_planned_without_memory_and_are_as_fast_as_the_network() -> None:
    device, size = described("h100", halves=True), 2**30
    inside, across = (device.collective("all_gather", size, 8, distance) for distance in (1, 8))
    assert across == pytest.approx(inside * device.link / device.network, rel=0.1)
    assert device.collective("all_gather", size, 16) < across  # all ports of both nodes are used
    assert device.message(size) < device.message(size, distance=8)
    found = plan(Pairs(), torch.randn(16, 1024), devices=16, device="h100", memory="80GiB")
    assert {1, 8} <= {row.choice.tensor for row in found.rows}
    assert {row.choice.stages * row.choice.data * row.choice.tensor for row in found.rows} == {16}
    assert not found.best.choice.is_late


class Made(Blocks):
    """Makes its layers late, and its batch in a hook; its step takes no index."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        Blocks.build(self)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["x"], batch["y"]

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.head(self.blocks(self.enter(batch[0]))), batch[1])


@pytest.mark.usefixtures("untimed")
def test_what_lightning_does_before_a_step_is_done_and_module_and_random_generators_stay_as_they_are() -> None:
    (x, y), made = Blocks.batches()[0], Made()
    before = random_state()
    found = plan(made, {"x": x, "y": y}, devices=2)
    assert not set(found.refused) - {"2 tensor ranks"} and found.best.memory.parameters > 0
    assert all(torch.equal(state, before[name]) for name, state in random_state().items())
    module, generator = Blocks(), torch.Generator().manual_seed(0)
    samples = TensorDataset(x, y)
    loader = DataLoader(samples, batch_size=len(samples), shuffle=True, generator=generator)
    weights, drawn = copy.deepcopy(module.state_dict()), generator.get_state()
    assert plan(module, loader, devices=2).rows
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters()) and module._trainer is None
    assert torch.equal(generator.get_state(), drawn)


class Drops(Layers):
    """Leaves layers out at random."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch) if torch.rand(()) > 0.5 else batch
        return batch.pow(2).mean()


class Untraceable(Layers):
    """Takes plain tensors only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise TypeError("a plain tensor, please")


@pytest.mark.parametrize(("kind", "said"), [(Drops, "random"), (Untraceable, "TypeError: a plain tensor, please")])
def test_a_step_that_no_layout_can_train_is_refused_on_each(kind: type[Layers], said: str) -> None:
    found = plan(kind(*products()), torch.randn(8, 256), devices=2, device="h100")
    assert not found.found
    assert any(said in reason for reason in found.refused.values())
    assert {"ddp, 2 replicas", "fully_sharded, 2 replicas"} <= set(found.refused)
