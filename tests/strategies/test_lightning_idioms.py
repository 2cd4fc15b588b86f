"""Hooks as Lightning's documentation overrides them: the numbers of one process, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm

from lightning_parallel.checkpoint import convert
from tests.strategies.contract_models import layers
from tests.strategies.failures import assert_refused
from tests.strategies.harness import Report, collect, joined, largest_difference, make_trainer
from tests.strategies.observed import Net, fit, loader
from tests.thorough import thorough


class Plain(Net):
    """The first and the fourth matrix are one, so stages hold it together."""

    tied = True

    def build(self) -> None:
        self.net = torch.nn.Sequential(*layers(6, 6, 8, 6, 6), torch.nn.Linear(6, 3))
        if self.tied:
            self.net[6].weight = self.net[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Untied(Plain):
    tied = False


def clip_by_hand(module: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)


class ClosureFirst(Plain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class ClosureAlone(Plain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Unwrapped(Plain):
    """And clips by value."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class WarmsUp(Plain):
    """And zeroes gradients every second time, and clips."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 5)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


NeverZeroes = type("NeverZeroes", (Plain,), {"optimizer_zero_grad": lambda *_: None})
ClipsByHand = type("ClipsByHand", (Untied,), {"configure_gradient_clipping": lambda self, *_, **__: clip_by_hand(self)})


class LogsNorms(Untied):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ScalesGradients(Plain):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)


class ClipsBeforeStep(Untied):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None) ** 0.5
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / max(1.0, total)


class ClipsBetween(Untied):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        clip_by_hand(self)
        optimizer.step()


class SkipsNaN(Untied):
    def on_after_backward(self) -> None:
        if any(p.grad.isnan().any() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


class Penalised(torch.nn.Module):
    """Keeps a term of the loss in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("term", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.term = y.square().mean()
        return y


class TermsInBuffers(Untied):
    def build(self) -> None:
        super().build()
        self.net[0], self.net[6] = Penalised(), Penalised()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        terms: Any = self.net[0].term + self.net[6].term
        self.log("terms", terms)
        return loss + 0.1 * terms


class BeginsATerm(Untied):
    """In the first update the weight of a term is 0, and its layer's gradients are zero: the optimizer steps it."""

    def build(self) -> None:
        super().build()
        self.side = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, loss = self.logits_and_loss(batch)
        return loss + min(1.0, self.global_step / 2) * self.side(logits).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


# Each under 1F1B or another schedule, half of them where ranks hold all layers or parts of each.
ODD = (ClosureFirst, NeverZeroes, Unwrapped, ScalesGradients)
EVEN = (WarmsUp, ClosureAlone)
PIPELINE = {"microbatches": 2}
LAYOUTS: dict[str | None, tuple[str, dict[str, Any]]] = {
    None: ("single", {}),
    "1f1b": ("sync", PIPELINE),
    "zbv": ("sync", {**PIPELINE, "schedule": "zbv"}),
    "replicas": ("sync", {"stages": 1, "microbatches": 2, "data_parallel": 2}),
    "tensor": ("tensor", {"plan": {"net.2": "column", "net.4": "row"}}),
    "tensor, undivided": ("tensor", {"plan": "none"}),
    "fully sharded": ("fsdp", {}),
    "async": ("async", PIPELINE),
    "threads": ("data", {"parallel_devices": [torch.device("cpu")] * 2}),
}


def fit_all(kinds: Sequence[Callable[[], Plain]], layout: str | None, **given: Any) -> list[Report]:
    """An epoch of each. Replicas too see equal batches, so that they train as one process."""
    return [fit(kind, *LAYOUTS[layout], max_epochs=1, **given) for kind in kinds]


@pytest.mark.parametrize(("layout", "accumulate", "kinds"), [
    ("1f1b", 2, (*EVEN, BeginsATerm)), ("zbv", 2, (*ODD[:3], TermsInBuffers)), ("replicas", 2, ODD[:3]),
    ("tensor", 1, EVEN), ("fully sharded", 2, ODD),
    ("tensor, undivided", 1, (ClipsByHand, SkipsNaN, LogsNorms)),  # each rank has all gradients
    *thorough(("1f1b", 2, ODD), ("zbv", 2, EVEN), ("tensor", 1, ODD), ("fully sharded", 2, EVEN)),
])  # fmt: skip
def test_overridden_hooks_give_the_numbers_of_one_process(
    launch: Any, layout: str, accumulate: int, kinds: tuple[type[Plain], ...]
) -> None:
    given = {"accumulate_grad_batches": accumulate, "samples": 12}
    (single,) = launch(fit_all, 1, kinds, None, **given)
    ranks = launch(fit_all, 2, kinds, layout, **given)
    for kind, expected, *reports in zip(kinds, single, *ranks, strict=True):
        assert largest_difference(joined(reports, "weights"), expected.weights) < 1e-10, kind
        assert all(report.metrics == pytest.approx(expected.metrics) for report in reports), kind


CLIP = ["changes gradients", "self.clip_gradients", "gradient_clip_val"]  # by the norm of a part


@pytest.mark.parametrize(("kind", "layout", "words"), [
    (ClipsByHand, "tensor", CLIP), (ClipsBeforeStep, "1f1b", CLIP), (ClipsBetween, "1f1b", CLIP),
    (SkipsNaN, "1f1b", ["SkipsNaN.on_after_backward", "FiniteLoss"]),
])  # fmt: skip
def test_what_goes_by_the_gradients_of_a_part_is_refused(
    refused: Any, kind: Any, layout: str, words: list[str]
) -> None:
    refused(words, fit_all, 2, [kind], layout, error="RuntimeError")


def test_norms_of_a_part_are_logged_with_a_warning(launch: Any) -> None:
    (report,), _ = launch(fit_all, 2, [LogsNorms], "1f1b")
    ((expected,),) = launch(fit_all, 1, [LogsNorms], None)
    assert len(report.warned_of("LogsNorms.on_before_optimizer_step")) == 1
    assert not expected.warned_of("on_before_optimizer_step")
    name = "grad_2.0_norm/net.8.weight"  # of the last stage
    assert report.metrics[name] == pytest.approx(expected.metrics[name])


@pytest.mark.parametrize(("kind", "error", "words"), [
    (ClosureFirst, "RuntimeError", ["ClosureFirst.optimizer_step", "optimizer.step(closure=closure)"]),
    (NeverZeroes, "ValueError", ["NeverZeroes.optimizer_zero_grad", "PipelineStrategy"]),
    (ScalesGradients, "ValueError", ["ScalesGradients.on_after_backward", "on_before_optimizer_step"]),
    (ClipsByHand, "RuntimeError", ["changes gradients", "self.clip_gradients"]),
])  # fmt: skip
def test_what_an_asynchronous_stage_does_itself_is_refused(
    launch: Any, kind: type[Plain], error: str, words: list[str]
) -> None:
    failures = launch(fit_all, 2, [partial(kind, tied=False)], "async", expect_errors=True)
    if error == "RuntimeError":  # in an update: the stage that comes there first may end the other one
        failures = [each for each in failures if "PeerLostError" not in each] or failures
    assert_refused(failures, error, words)


class Counts(Untied):
    """Logs numbers of the batch, some of which depend on no layer, with one ``reduce_fx`` for all."""

    reduce_fx: str

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        logits, loss = self.logits_and_loss(batch)
        hits = (logits.argmax(1) == labels).sum()
        values = {
            "constant": 2.0, "batch": batch_idx, "step": self.trainer.global_step, "size": len(inputs),
            "elements": inputs.numel(), "tensor": torch.tensor(3.0), "weight": self.net[8].weight.detach().sum(),
            "labels": labels.double().sum(), "largest label": labels.max(), "mean label": labels.double().mean(),
            "spread": labels.double().std(), "loss": loss, "first weight": self.net[0].weight.detach().norm(),
        }  # fmt: skip
        for name, value in values.items():
            self.log(name, value, reduce_fx=self.reduce_fx, on_step=True, on_epoch=True)
        if self.reduce_fx in ("mean", "sum"):  # an integer that layers computed
            self.log("hits", hits, reduce_fx=self.reduce_fx, on_step=True, on_epoch=True)
        self.log("doubtful", hits.double() * 3, reduce_fx=self.reduce_fx)
        self.log("asked for", loss.detach().square().sqrt().item())  # which a look guesses
        return loss


@pytest.mark.parametrize(
    ("reduce_fx", "layout"), [("mean", "1f1b"), ("sum", "zbv"), ("sum", "tensor"), ("max", "1f1b")]
)
def test_what_a_step_logs_is_the_batch_s(launch: Any, reduce_fx: str, layout: str) -> None:
    expected, ranks = counted(launch, reduce_fx, layout, 2)
    names = [text.split("'")[1] for text in ranks[0].warned_of("self.log(")]
    for rank in ranks:
        wrong = {name for name in expected if rank.metrics[name] != pytest.approx(expected[name])}
        assert wrong <= {*names}
    assert names in ([], ["doubtful"])


def test_what_replicas_in_one_process_can_t_tell_is_warned_of(launch: Any) -> None:
    expected, (report,) = counted(launch, "sum", "threads", 1)
    for name in ("loss", "constant", "batch", "step", "size", "elements", "tensor", "weight", "labels", "hits"):
        assert report.metrics[name] == pytest.approx(expected[name]) or report.warned_of(f"self.log({name!r}")


def counted(launch: Any, reduce_fx: str, layout: str, ranks: int) -> tuple[dict[str, float], list[Report]]:
    """What one process logs, and the reports of the ranks."""
    kinds, given = [partial(Counts, reduce_fx=reduce_fx)], {"samples": 40, "batch": 8}
    ((expected,),) = launch(fit_all, 1, kinds, None, **given)
    return expected.metrics, [report for (report,) in launch(fit_all, ranks, kinds, layout, **given)]


class Edits(Untied):
    """Keeps a value of its own, and reads the model otherwise than it was saved."""

    touches = True
    counted = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]
        if self.touches:
            state = checkpoint["state_dict"]
            state["net.8.weight"] = torch.ones_like(state["net.8.weight"])
            state["net.0.weight"].mul_(0.5)


class Forgets(Edits):
    """Begins with a new optimizer."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["optimizer_states"] = []


Looks = type("Looks", (Edits,), {"touches": False})


class SavesOthers(Edits):
    """As an average of weights is often saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "net.8.weight" in checkpoint["state_dict"]:  # on one rank
            checkpoint["state_dict"]["net.8.weight"] = torch.zeros(3, 6)


RESUMED = (Edits, Forgets, Looks)


def save(layout: str, path: Path, kind: type[Edits] = Edits) -> None:
    strategy, settings = LAYOUTS[layout]
    trainer = make_trainer(strategy, [], settings, max_steps=2)
    trainer.fit(kind(), loader(20))
    trainer.save_checkpoint(path)


def resume(layout: str | None, path: Path) -> list[tuple[Report, int]]:
    strategy, settings = LAYOUTS[layout]
    found = []
    for kind in RESUMED:
        module, trainer = kind(), make_trainer(strategy, [], settings, max_steps=4)
        trainer.fit(module, loader(20), ckpt_path=path)
        found.append((collect(Report(), trainer, module), module.counted))
    return found


def test_a_checkpoint_is_read_as_on_load_checkpoint_leaves_it(launch: Any, tmp_path: Path) -> None:
    launch(save, 2, "1f1b", tmp_path / "directory")
    convert(tmp_path / "directory", tmp_path / "file.ckpt")
    (single,) = launch(resume, 1, None, tmp_path / "file.ckpt")
    for path in ("directory", "file.ckpt"):
        ranks = launch(resume, 2, "1f1b", tmp_path / path)
        for kind, (expected, counted), *reports in zip(RESUMED, single, *ranks, strict=True):
            weights = joined([report for report, _ in reports], "weights")
            assert largest_difference(weights, expected.weights) < 1e-10, (kind, path)
            assert {each for _, each in reports} == {counted} == {7}


def test_other_values_for_the_model_s_are_refused_when_they_are_saved(refused: Any, tmp_path: Path) -> None:
    words = ["on_save_checkpoint", "'net.8.weight'", "a key of their own"]
    refused(words, save, 2, "1f1b", tmp_path / "it", SavesOthers)
