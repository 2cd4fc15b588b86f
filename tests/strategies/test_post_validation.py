"""Clipping for which stages don't wait has, to the bit, the numbers of stages that wait, or it is refused."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_parallel.steps import post_validation
from tests.strategies.equality import assert_equal
from tests.strategies.failures import HooksAllOptimizers
from tests.strategies.harness import ALL, Report, Witness, announcing, collect, make_trainer
from tests.thorough import thorough
from tools.workers.worker import texts_of_warnings

V = {"schedule": "zbv", "microbatches": 4}


class Gradients(Witness):
    """It doesn't read weights, so it isn't refused."""

    reads_weights = False


def scheduled(optimizer: Any) -> Any:
    """Its rate has changed by the time when an update is made again."""
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


class Keeping(L.LightningModule):
    """Layers of the first chunk write to themselves and draw random numbers. A skip connection from the first to the
    last layer stays on one stage of a V."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(8)
        )

    def training_step(self, batch: Tensor) -> Tensor:
        x = first = self.layers[0](batch)
        for layer in self.layers[1:-1]:
            x = x + layer(x)
        loss = (self.layers[-1](x) + first).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    @staticmethod
    def loader() -> Any:
        samples = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))
        return torch.utils.data.DataLoader(samples, batch_size=16)  # type: ignore[arg-type]  # the last has eight


class Odd(torch.optim.Optimizer):
    """Counts, and takes its state, before it calls the closure. Its first step makes the count, in a group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        held = [(group, p, self.state[p]) for group in self.param_groups for p in group["params"]]
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group, p, state in held:
                momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9)
                if p.grad is not None:
                    momentum += p.grad
                p -= momentum * group["lr"] / group["count"]
        return loss


class Root(nn.Linear):
    """The gradient of its bias, and no other one, is infinite where it is given a zero."""

    def forward(self, x: Tensor, inside: float = 1.0) -> Tensor:  # type: ignore[override]
        shift = self.bias - self.bias.detach()
        if not inside and shift.requires_grad:
            shift.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return super().forward(x) + shift


class Overflowing(Keeping):
    """Its second update is no number. An optimizer that writes to its options, and a scheduler that does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Root(6, 6)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[1](self.layers[0](batch), float(batch_idx != 1))
        for layer in self.layers[2:]:
            x = x + layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return scheduled(Odd(self.parameters()))


class OddlyStepped(Keeping):
    """In every second batch, no layer has a gradient but the last, and that is clipped."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers[:-1]:
            x = x + layer(x)
        return self.layers[-1](x.detach() * 9 if batch_idx % 2 else x).square().mean() * (1 + batch_idx % 2)

    def configure_optimizers(self) -> Any:
        return Odd(self.parameters())


OWN = (Keeping, OddlyStepped, Overflowing)
MODELS: dict[str, Any] = {**ALL, **{kind.__name__: kind for kind in OWN}}


def trained(
    model: str,
    strategy: str,
    options: dict[str, Any],
    most: float = 1.0,
    scale: float | None = None,
    growth_interval: int = 2,
    **given: Any,
) -> tuple[list[str], dict[str, Tensor], Report]:
    """What has become of each update, the buffers, and what this rank has. Stages wait where more than the part
    ``most`` of updates was clipped. ``scale`` is that of losses at the start."""
    scaler = None if scale is None else GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    if scaler is not None:
        given["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    if scaler is not None:
        torch.set_default_dtype(torch.float32)  # which is computed with in float16
    L.seed_everything(3)
    module, report, fates = MODELS[model](), Report(), list[str]()
    trainer = make_trainer(strategy, [Gradients(report)], options, **{"max_epochs": 2} | given)

    def noting(name: str) -> Any:
        before = getattr(post_validation.PostValidation, name)

        def noted(self: Any) -> None:
            fates.append(name)
            before(self)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post_validation, "_MOST", most)
        patch.setattr(post_validation, "_REMEMBERED", 10)
        for name in ("accept", "take_back"):
            patch.setattr(post_validation.PostValidation, name, noting(name))
        trainer.fit(module, module.loader(), *([] if isinstance(module, Keeping) else [module.loader()]))
    buffers = {} if scaler is None else {"scale": torch.tensor(scaler.get_scale())}
    buffers |= {name: buffer.clone() for name, buffer in module.named_buffers() if type(buffer) is Tensor}
    return fates, buffers, collect(report, trainer, module)


@pytest.mark.parametrize(("model", "limit", "ranks", "options", "given"), [
    ("Keeping", 0.55, 3, {}, {}),
    ("OddlyStepped", 0.55, 2, {}, {}),
    ("Overflowing", 100.0, 2, {}, {"max_epochs": 1}),
    ("LeNet", 0.5, 4, {"data_parallel": 2}, {"val_check_interval": 1}),
    # No layer's gradients overflow but the second one's, on the last stage.
    ("Overflowing", 8.0, 2, {}, {"scale": 8.0}),
    ("Overflowing", None, 3, {}, {"scale": 8.0, "val_check_interval": 1}),
    # What overflows is finite afterwards.
    ("Overflowing", 0.1, 2, {}, {"scale": 8.0, "gradient_clip_algorithm": "value"}),
    ("LeNet", 0.8, 2, {}, {"scale": 2.0**22}),  # which is soon too large
    *thorough(
        ("Llama", None, 4, {"tensor_parallel": 2}, {"scale": 2.0**20, "max_epochs": 3}),
        ("Llama", 0.7, 4, {"tensor_parallel": 2}, {"max_epochs": 3}),
        ("LeNet", 0.3, 2, {}, {"accumulate_grad_batches": 2, "max_epochs": 6}),
    ),
])  # fmt: skip
def test_updates_that_are_validated_later_are_those_of_stages_that_wait(
    launch: Any, model: str, limit: float | None, ranks: int, options: dict[str, Any], given: dict[str, Any]
) -> None:
    given = {"gradient_clip_val": limit} | given
    run = partial(announcing, trained) if model == "Keeping" else trained
    runs = launch(run, ranks, model, "sync", V | options | {"post_validation": True}, **given)
    waiting = launch(trained, ranks, model, "sync", V | options, **given)
    for fates, _, found in runs:
        assert fates == runs[0][0] and {*fates} == {"accept", "take_back"}
        assert len(fates) == len(found.gradients)
    assert_the_same(runs, waiting)


def assert_the_same(runs: list[Any], others: list[Any]) -> None:
    """To the bit."""
    for (_, buffers, found), (_, kept, expected) in zip(runs, others, strict=True):
        ours = chain(found.gradients, [found.weights, buffers])
        for one, other in zip(ours, chain(expected.gradients, [expected.weights, kept]), strict=True):
            assert one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
        assert found.metrics == expected.metrics


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def without_gain() -> list[str]:
    """What is warned of where no stage would go on by itself."""
    with texts_of_warnings() as found:
        trainer = make_trainer("sync", [], V | {"microbatches": 1, "post_validation": True}, gradient_clip_val=1.0)
        trainer.fit(Keeping(), Keeping.loader())
    return [text for text in found if "post_validation" in text]


def test_that_it_has_no_effect_is_warned_of_once(launch: Any) -> None:
    (told,), *others = launch(without_gain, 2)
    assert "no effect" in told and "microbatches=1" in told and others == [[]]


def test_where_many_updates_are_clipped_stages_wait_and_have_the_numbers_of_one_process(launch: Any) -> None:
    given = {"gradient_clip_val": 0.3, "max_epochs": 4}
    ((*_, expected),) = launch(trained, 1, "LeNet", "single", {}, **given)
    runs = launch(trained, 2, "LeNet", "sync", V | {"post_validation": True}, 0.2, **given)
    assert_equal([report for *_, report in runs], expected)
    assert [fates for fates, *_ in runs] == [["take_back"] * 3] * 2


def test_where_many_updates_are_skipped_stages_wait_until_few_are(launch: Any) -> None:
    given = {"scale": 2.0**27, "growth_interval": 100, "max_epochs": 7}  # its first updates overflow
    waiting = launch(trained, 2, "Keeping", "sync", V, **given)
    runs = launch(trained, 2, "Keeping", "sync", V | {"post_validation": True}, 0.2, **given)
    assert_the_same(runs, waiting)
    for fates, *_ in runs:
        assert {*fates[:3]} == {"take_back"} and {*fates[3:]} == {"accept"}


def empty(*_: Any) -> None:
    pass


def keep(optimizer: Any) -> Any:
    optimizer.seen = []
    return optimizer


Shown = type("Shown", (Callback,), {"on_train_batch_end": empty})
Clamped = type("Clamped", (Keeping,), {"optimizer_step": lambda self, *args: Keeping.optimizer_step(self, *args)})
Counting = type("Counting", (torch.optim.SGD,), {})
Counted = type("Counted", (Keeping,), {"configure_optimizers": lambda self: keep(Counting(self.parameters()))})
Fused = type(
    "Fused", (Keeping,), {"configure_optimizers": lambda self: torch.optim.AdamW(self.parameters(), fused=True)}
)
HOOKING = LambdaCallback(on_train_start=lambda trainer, _: trainer.optimizers[0].register_step_post_hook(empty))

REFUSED: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "Shown.on_train_batch_end": (Keeping, [Shown()], {}),
    "EMAWeightAveraging": (Keeping, [EMAWeightAveraging()], {}),
    "Clamped.optimizer_step": (Clamped, [], {}),
    "a hook on the steps of AdamW": (Keeping, [HOOKING], {}),
    "with a hook on the steps of AdamW": (Keeping, [HooksAllOptimizers()], {}),
    "Counting keeps 'seen'": (Counted, [], {}),
    "AdamW(fused=True)": (Fused, [], {"plugins": [MixedPrecision("16-mixed", "cpu")]}),
}


def refusals() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, (kind, callbacks, given) in REFUSED.items():
        options = V | {"post_validation": True}
        trainer = make_trainer("sync", callbacks, options, gradient_clip_val=1.0, **given)
        try:
            trainer.fit(kind(), Keeping.loader())
        except ValueError as error:
            found[name] = f"{trainer.global_step} {error}"
    return found


def test_it_is_refused_before_training_where_an_update_may_be_seen_or_cannot_be_taken_back(launch: Any) -> None:
    for found in launch(refusals, 2):
        assert found.keys() == REFUSED.keys()
        assert all(text.startswith("0 post_validation=True") and name in text for name, text in found.items())
