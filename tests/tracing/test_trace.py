"""The look at a step: what it calls, in which order, what each call needs, and nothing left behind."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_parallel.absent.tensor import AbsentValueError
from lightning_parallel.cuts.layers import Layers
from lightning_parallel.seeding import random_state
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.operations import OperationsNoted
from lightning_parallel.tracing.plain_values import attribute_uses
from lightning_parallel.tracing.trace import Trace
from tests.pipeline.nets import Net, UNet

X = torch.linspace(-1, 1, 15).view(5, 3)


def seen(model: Any, **options: Any) -> Trace:
    return trace(model, Layers(model, None).units, lambda: model.step(X), **options)


class Labelled(Tensor):
    """With the names of its columns."""


def test_a_layer_that_is_given_what_carries_more_than_numbers_is_refused_by_name() -> None:
    """A layer of another stage returns a plain tensor for it."""
    x = X.as_subclass(Labelled)
    net = UNet()
    assert trace(net, Layers(net, None).units, lambda: net.step(x)).stopped is None
    x.labels = ["a", "b", "c"]  # type: ignore[attr-defined]
    stopped = trace(net, Layers(net, None).units, lambda: net.step(x)).stopped
    assert isinstance(stopped, ValueError) and "'stem' is given a Labelled" in str(stopped) and "labels" in str(stopped)


def test_an_error_in_a_layer_that_is_asked_without_values_names_it() -> None:
    """Such as an LSTM's, given what another one has packed."""

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("an axis should be positive")

    model = Net()
    model.blocks[1] = Fails(6, 6)
    stopped = seen(model).stopped
    assert isinstance(stopped, RuntimeError) and any("'blocks.1'" in note for note in stopped.__notes__)


def test_a_step_that_draws_leaves_the_generators_as_they_were() -> None:
    model, state = Net(), random_state()
    trace(model, Layers(model, None).units, lambda: model.step(X + torch.rand(()) + random.random()))
    assert all(torch.equal(values, state[name]) for name, values in random_state().items())


def test_a_deep_model_takes_little_time_and_no_memory_for_parameters() -> None:
    """It would hold 50 layers of 200 million parameters each."""
    config = LlamaConfig(
        num_hidden_layers=50, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, vocab_size=32000,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb.to_empty(device="cpu")
    ids = torch.zeros(1, 16, dtype=torch.int64)
    units = Layers(model, None).units
    start = time.process_time()
    found = trace(model, units, lambda: model(input_ids=ids).logits)
    assert found.stopped is None
    assert [call.unit for call in found.calls][1:51] == [f"model.layers.{i}" for i in range(50)]
    assert time.process_time() - start < 3  # 1 at most on an idle machine


def test_a_signal_while_the_step_goes_on_ends_the_look() -> None:
    """Lightning raises a SystemExit of its own in the handler. One that the step raises doesn't end it."""

    class Stopped(Net):
        error: type[SystemExit] = SystemExit

        def step(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if not x.isfinite().all():
                raise self.error
            return x.sum()

    model = Stopped()
    assert isinstance(seen(model, plain_values=True).stopped, AbsentValueError)
    model.error = SIGTERMException
    with pytest.raises(SIGTERMException):
        seen(model, plain_values=True)


def test_what_a_step_says_of_guessed_values_is_not_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """As torchmetrics' aggregators do, which warn of NaN."""
    model = nn.Linear(2, 1)

    def step() -> Tensor:
        loss = model(torch.ones(1, 2)).mean()
        if loss.isnan():
            warnings.warn("NaN", stacklevel=1)
            print("NaN")
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace(model, {id(model): "model"}, step, beyond=True)
    assert not caught and not capsys.readouterr().out


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_attention_on_a_cpu_counts() -> None:
    q, k = torch.ones(2, 8, 3, 4), torch.ones(2, 8, 5, 4)
    with OperationsNoted() as noted, torch.no_grad():
        F.scaled_dot_product_attention(q, k, k)
    assert noted.flops == 2 * (2 * 2 * 8 * 3 * 5 * 4)


def test_a_formula_that_a_user_adds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, torch.ops.aten.sin, lambda *_, **__: 7)
    with OperationsNoted() as noted:
        torch.ones(3).sin()
    assert noted.flops == 7


def test_results_count_but_for_views_and_what_is_changed_in_place() -> None:
    layer, x = nn.Linear(4, 3, bias=False), torch.ones(2, 5, 4)
    with OperationsNoted() as noted, torch.no_grad():
        y = layer(x)  # three dimensions: a matmul of a view
        y.transpose(0, 1)
        y.add_(1)
        y.exp()
    assert noted.nbytes == 2 * (2 * 5 * 3 * 4)


# -- uses of attributes ------------------------------------------------------------------------------------------------


class Wrapped(nn.Linear):
    """Has one of the two methods itself, and inherits from a class that is watched, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def test_uses_are_told_in_their_order_and_classes_are_as_before() -> None:
    modules, told = [Wrapped(2, 2), nn.Linear(2, 2)], []
    before = [dict(vars(kind)) for kind in (Wrapped, nn.Linear)]
    for module in modules:
        module.value, module.other = 1, 2
        module.register_buffer("count", torch.zeros(()))
    with pytest.raises(KeyError), attribute_uses(modules[:1], lambda *use: told.append(use)):
        for module in modules:
            module.value += module.other  # type: ignore[operator]
            module.count += 1  # type: ignore[operator]
        raise KeyError
    uses = [(modules[0], name, assigned) for name in ("value", "count") for assigned in (False, True)]
    assert [*dict.fromkeys(use for use in told if use in uses)] == uses  # torch's own method may read, too
    assert (modules[0], "other", False) in told and all(part is modules[0] for part, *_ in told)
    assert [module.value for module in modules] == [3, 3]
    assert before == [dict(vars(kind)) for kind in (Wrapped, nn.Linear)]
