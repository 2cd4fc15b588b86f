"""Late gradients in one process are those of loops written by hand.

tests/strategies/test_pipeline_async.py compares what processes compute with them, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_parallel.pipeline.staleness import Correction, Stashing
from tests.pipeline.nets import LAYERS
from tools.study.delayed import Delayed, Reading

ADAMW = {"lr": 0.03, "eps": 1e-3, "weight_decay": 0.1}
KINDS = ("gru", "x * w", "attention", "conv1d", "layernorm", "x @ w", "rmsnorm", "batchnorm", "linear")


pytestmark = pytest.mark.usefixtures("in_double_precision")


def net(stages: int) -> nn.Sequential:
    """Stages of kinds of layers other than Linear, a parameter that no loss depends on, and a frozen one in each."""
    torch.manual_seed(1)
    parts = []
    for s in range(stages):
        layers = [LAYERS[kind](6) for kind in KINDS[s::stages][:3]]
        frozen = LAYERS["x * w"](6).requires_grad_(False)
        stage = nn.Sequential(*layers, nn.Tanh(), frozen)
        stage.unused = nn.Parameter(torch.randn(2))
        parts.append(stage)
    return nn.Sequential(*parts)


def parameters_of(model: nn.Sequential) -> list[dict[str, nn.Parameter]]:
    return [{f"{s}.{name}": p for name, p in stage.named_parameters()} for s, stage in enumerate(model)]


def batch(k: int) -> Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(k))


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def optimizers_of(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(stage.parameters(), **ADAMW) for stage in model]


class Trained:
    """A model that `Delayed` trains."""

    def __init__(self, stages: int, **options: Any) -> None:
        self.model = net(stages)
        self.delayed = Delayed(parameters_of(self.model), **options)
        self.optimizers = optimizers_of(self.model)
        self.k = 0
        self.losses: list[float] = []
        self.readings: list[Reading] = []

    def feed(self, m: int, *, ends_update: bool = True, weight: float | None = None) -> None:
        for reading in self.delayed.feed(m, ends_update=ends_update):
            loss = loss_of(functional_call(self.model, reading.weights, (batch(self.k),)))
            self.delayed.backward(reading, loss, weight=1 / m if weight is None else weight)
            self.losses.append(loss.item())
            self.readings.append(reading)
            self.k += 1
        if ends_update:
            self.delayed.update(lambda stage: self.optimizers[stage].step())

    def run(self, m: int, updates: int) -> Trained:
        for _ in range(updates):
            self.feed(m)
        return self


Read = Callable[[int, int], int]  # stage, microbatch: the version that is read
Correct = Callable[[int, Tensor, list[Tensor]], Tensor]  # stage, parameter, its updates so far: what is read


def by_hand(
    stages: int, m: int, updates: int, read: Read, correct: Correct = lambda s, v, u: v
) -> tuple[list[float], dict[str, Tensor]]:
    model = net(stages)
    parameters = parameters_of(model)
    optimizers = optimizers_of(model)
    names = dict(model.named_parameters())
    history = [[{name: p.detach().clone() for name, p in stage.items()}] for stage in parameters]
    made: dict[str, list[Tensor]] = {name: [] for name in names}
    losses = []
    for t in range(updates):
        gathered: dict[str, Tensor] = {}
        for k in range(t * m, (t + 1) * m):
            used = {name: w.clone() for s in range(stages) for name, w in history[s][read(s, k)].items()}
            trained = [name for name in used if names[name].requires_grad]
            for name in trained:
                used[name].requires_grad_()
            loss = loss_of(functional_call(model, used, (batch(k),)))
            gradients = torch.autograd.grad(loss, [used[name] for name in trained], allow_unused=True)
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    gathered[name] = gathered.get(name, 0) + gradient / m
            losses.append(loss.item())
        for s, stage in enumerate(parameters):
            before = {name: p.detach().clone() for name, p in stage.items()}
            for name, p in stage.items():
                p.grad = gathered.get(name)
            optimizers[s].step()
            for name, p in stage.items():
                made[name].append(before[name] - p.detach())
            history[s].append({name: correct(s, p.detach().clone(), made[name]) for name, p in stage.items()})
    return losses, {name: p.detach() for name, p in names.items()}


def assert_trained(trained: Trained, expected: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, parameters = expected
    assert trained.losses == pytest.approx(losses, rel=0, abs=1e-12)
    for name, p in trained.model.named_parameters():
        torch.testing.assert_close(p.detach(), parameters[name], rtol=0, atol=1e-12)


def ahead(stages: int, s: int, extra: int = 0) -> int:
    return (stages - 1 - s) * (1 + extra)


SIZES = [(2, 1, 0), (3, 1, 0), (3, 2, 0), (4, 3, 0), (3, 4, 0), (3, 2, 1), (2, 3, 2)]


# -- loops by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "m", "extra"), SIZES)
def test_stash_reads_the_weights_of_as_many_updates_as_backwards_allow(stages: int, m: int, extra: int) -> None:
    trained = Trained(stages, correction=None, extra_in_flight=extra).run(m, 8)
    assert_trained(trained, by_hand(stages, m, 8, lambda s, k: max(0, (k - ahead(stages, s, extra)) // m)))


@pytest.mark.parametrize(("stages", "m"), [(2, 1), (3, 2), (3, 4)])
def test_2bw_applies_gradients_of_the_weights_before(stages: int, m: int) -> None:
    # W(t+1) = W(t) - lr * g(W(t-1)), the first two updates from W(0)
    trained = Trained(stages, weights="2bw", correction=None).run(m, 6)
    assert_trained(trained, by_hand(stages, m, 6, lambda s, k: max(0, k // m - 1)))


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize(("stages", "m", "extra"), SIZES)
def test_corrected_readings_follow_the_recursion(stages: int, m: int, extra: int, second_order: bool) -> None:
    def correct(s: int, v: Tensor, u: list[Tensor]) -> Tensor:
        c = ahead(stages, s, extra) / m
        if not second_order or c > 1:
            return v - c * u[-1]
        correction = torch.zeros_like(v)
        for update in u:
            correction = c * (1 + min(c, 0.9)) * update - min(c, 0.9) * correction
        return v - correction

    correction = "second_order" if second_order else "error_feedback"
    trained = Trained(stages, correction=correction, extra_in_flight=extra).run(m, 6)
    assert_trained(trained, by_hand(stages, m, 6, lambda s, k: max(0, (k - ahead(stages, s, extra)) // m), correct))


def scalars(stages: int) -> list[dict[str, nn.Parameter]]:
    return [{f"w{s}": nn.Parameter(torch.tensor(1.0 + 0.1 * s))} for s in range(stages)]


@pytest.mark.parametrize("correction", [None, "error_feedback", "second_order"])
@pytest.mark.parametrize(("stages", "m"), [(3, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_latest_multiplies_by_the_newest_weights_and_the_forwards_activations(
    weights: Stashing, stages: int, m: int, correction: Correction
) -> None:
    """y = x * w0 * w1 * ..., loss y^2 / 2: by hand, dloss/dw_s = y * (what came in) * (product of the w after)."""
    parameters = scalars(stages)
    delayed = Delayed(parameters, weights=weights, correction=correction)
    reads = [[p.item() for p in stage.values()] for stage in parameters]
    v = [r[0] for r in reads]
    u: list[list[float]] = [[] for _ in v]
    for t in range(6):
        gradients = [0.0] * stages
        for i, reading in enumerate(delayed.feed(m)):
            x, k = 1 + 0.1 * i, t * m + i
            y = torch.tensor(x)
            for w in reading.weights.values():
                y = y * w
            delayed.backward(reading, y.square() / 2, weight=1 / m)
            forward = [reads[s][max(0, (k - ahead(stages, s)) // m)] for s in range(stages)]
            backward = [r[-1] for r in reads] if weights == "latest" else forward
            result = x
            for w in forward:
                result *= w
            assert y.item() == pytest.approx(result, rel=1e-13)
            for s in range(stages):
                product = result * x / m
                for w in (*forward[:s], *backward[s + 1 :]):
                    product *= w
                gradients[s] += product

        def step(s: int) -> None:
            with torch.no_grad():
                for p in parameters[s].values():
                    p -= 0.02 * p.grad

        delayed.update(step)
        for s in range(stages):
            u[s].append(0.02 * gradients[s])
            v[s] -= u[s][-1]
            c = ahead(stages, s) / m if correction else 0.0
            r = v[s] - c * u[s][-1]
            if correction == "second_order" and c <= 1:
                b = min(c, 0.9)
                r -= c * b * u[s][-1] - b * (v[s] + u[s][-1] - reads[s][-1])
            reads[s].append(r)
            assert parameters[s][f"w{s}"].item() == pytest.approx(v[s], rel=1e-12)


# -- versions ------------------------------------------------------------------------------------------------------


def test_2bw_without_the_version_it_reads_is_refused() -> None:
    delayed = Delayed(scalars(4), weights="2bw")
    delayed.feed(2)
    delayed.update(lambda s: None)
    delayed.feed(2)  # reads the initial weights too
    delayed.update(lambda s: None)
    with pytest.raises(ValueError, match="weights='2bw' with 2 microbatches.*at least 3"):
        delayed.feed(2)
    enough = Delayed(scalars(4), weights="2bw")
    for _ in range(5):
        enough.feed(3)
        enough.update(lambda s: None)
