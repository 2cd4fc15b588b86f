"""Ways to write a loss: each has the numbers of one process, or a warning names its line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.strategies.harness import make_trainer
from tests.strategies.spellings import CLASSES, FORMS, IDIOMS, LEARNED, MASKS, OF_SAMPLES, SEQUENCES, Loss, batch_of
from tests.thorough import thorough
from tools.workers.worker import texts_of_warnings

EXACT = 1e-9  # float64; relative

Gradients = dict[str, Tensor]


class Spelled(L.LightningModule):
    """Its parameters stay as they are, so each batch stands for itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
        self.loss = loss
        self.losses: list[float] = []
        self.gradients: list[Gradients] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, m = batch
        z = self.layers(x)
        losses = F.cross_entropy(z.transpose(1, 2), y.clamp(min=0), reduction="none")
        loss = self.loss(losses, z, y, m)
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = self.named_parameters()
        found = {name: p.grad.clone() for name, p in named if p.grad is not None and type(p) is nn.Parameter}
        self.gradients.append(found)
        optimizer.zero_grad()  # a step by NaN, even of length 0, would change them

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def in_one_process(loss: Loss, masks: Sequence[str]) -> list[tuple[float, Gradients]]:
    """The loss and the gradients of each batch, until one has no loss with a gradient: Lightning ends the run then."""
    torch.manual_seed(0)
    module = Spelled(loss)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    found = []
    for seed, mask in enumerate(masks):
        module.zero_grad()
        whole = module.training_step(batch_of(mask, seed), 0)
        if not isinstance(whole, Tensor) or not whole.requires_grad:
            break
        whole.backward()
        found.append((float(whole), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}))
    return found


def in_a_pipeline(loss: Loss, masks: Sequence[str], stages: int, **options: Any) -> tuple[Spelled, list[str]]:
    """The module that has been trained, and the warnings."""
    torch.manual_seed(0)
    module = Spelled(loss)
    trainer = make_trainer("sync", [], {"stages": stages, **options}, max_epochs=1)
    with texts_of_warnings() as told:
        try:
            trainer.fit(module, DataLoader([batch_of(mask, i) for i, mask in enumerate(masks)], batch_size=None))
            assert float(trainer.callback_metrics["loss"]) == pytest.approx(module.losses[-1], rel=EXACT, nan_ok=True)
        except RuntimeError as error:
            assert "has no gradient" in str(error)
    return module, [text for text in told if "microbatches=1" in text]


def compared(loss: Loss, masks: Sequence[str], stages: int, **options: Any) -> tuple[str, list[str]]:
    """One of "equal", "warned" and "silent"; and what differs."""
    wanted = in_one_process(loss, masks)
    module, told = in_a_pipeline(loss, masks, stages, **options)
    off = [f"{len(module.losses)} batches for {len(wanted)}"] if len(module.losses) != len(wanted) else []
    for i, (value, gradients) in enumerate(wanted[: len(module.losses)]):
        if module.losses[i] != pytest.approx(value, rel=EXACT, nan_ok=True):
            off.append(f"batch {i}: loss {module.losses[i]} for {value}")
        here = {name for name, p in module.named_parameters() if type(p) is nn.Parameter}
        missing = (gradients.keys() & here) - module.gradients[i].keys()
        off += [f"batch {i}: no gradient of {name}" for name in sorted(missing)]
        scale = max((float(each.nan_to_num().abs().max()) for each in gradients.values()), default=1.0)
        for name, gradient in module.gradients[i].items():
            expected = gradients.get(name, torch.zeros_like(gradient))
            if not torch.allclose(gradient, expected, rtol=0, atol=EXACT * scale + 1e-13, equal_nan=True):
                off.append(f"batch {i}: gradient of {name}")
    return ("equal" if not off else "warned" if told else "silent"), off + told


class Learned(nn.Module):
    """A loss with learned factors."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss = loss
        self.factors = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, *args: Tensor) -> Tensor:
        x, z, _, m = args
        return self.loss(self.factors, x, z, m)


# Losses, and what counts in the batches of runs. Where the last isn't split evenly, microbatches may have one sample.
TABLES: dict[str, tuple[dict[str, Any], Sequence[Sequence[str]]]] = {
    "forms": (FORMS, [(mask,) for mask in [*MASKS][1:5]]),
    "idioms": (IDIOMS, SEQUENCES),
    "learned": (LEARNED, [("some", "all", "some of five samples"), ("all", "five samples")]),
    "of samples": (OF_SAMPLES, [("a sample has none", "five samples"), ("one microbatch", "some of five samples")]),
}


def compare(table: str, stages: int, every: int, start: int, **options: Any) -> dict[str, tuple[str, list[str]]]:
    """Some losses of a table, each with one of its sequences."""
    losses, sequences = TABLES[table]
    found = {}
    for i, (name, loss) in enumerate([*losses.items()][::every], start):
        masks = sequences[i % len(sequences)]
        made = Learned(loss) if losses is LEARNED else loss
        found[f"{name}: {', '.join(masks)}"] = compared(made, masks, stages, **options)
    return found


@pytest.mark.parametrize(("table", "stages", "every", "start", "options", "most"), [
    ("forms", 1, 1, 0, {}, 0.15), ("forms", 2, 7, 1, {}, 0.15),
    ("idioms", 1, 3, 0, {}, 0.7),
    ("learned", 1, 2, 0, {}, 0.0), ("learned", 2, 6, 1, {"schedule": "zbv"}, 0.0),
    ("of samples", 1, 2, 0, {"microbatches": 8}, 0.0),
    *thorough(
        *(("forms", 2, 1, i, {"schedule": schedule}, 0.15) for i, schedule in enumerate(("1f1b", "gpipe", "zbv"))),
        *(("idioms", 1, 1, i, {"microbatches": k}, 0.7) for i in range(9) for k in (4, 8)),
        *((table, k, 1, i, {}, 0.0) for table in ("learned", "of samples") for k in (1, 2) for i in (0, 1)),
    ),
])  # fmt: skip
def test_every_loss_is_equal_or_warned_of(
    launch: Any, table: str, stages: int, every: int, start: int, options: dict[str, Any], most: float
) -> None:
    """And most of those that can be equal are: at most so many are warned of."""
    options = {"microbatches": 4} | options
    found = launch(compare, stages, table, stages, every, start, **options)[0]
    assert not {name: why for name, (what, why) in found.items() if what == "silent"}
    wrong = {name: why for name, (what, why) in found.items() if what == "warned"}
    assert len(wrong) <= most * len(found), wrong
