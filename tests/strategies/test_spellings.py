"""Ways to write a loss: each has the numbers of one process, or a warning names its line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_parallel as lp
from tests.strategies.idioms import IDIOMS, SEQUENCES
from tests.strategies.spellings import CLASSES, LEARNED, OF_SAMPLES, Loss, batch_of, spellings
from tests.thorough import thorough
from tools.workers.pool import WorkerPool
from tools.workers.worker import texts_of_warnings

ALL = {f"{each.name}, {each.mask}": each for each in spellings()}
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
    trainer = L.Trainer(
        accelerator="cpu", devices=stages, max_epochs=1, strategy=lp.PipelineStrategy(stages=stages, **options),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with texts_of_warnings() as told:
        try:
            trainer.fit(module, DataLoader([batch_of(mask, i) for i, mask in enumerate(masks)], batch_size=None))
            assert float(trainer.callback_metrics["loss"]) == pytest.approx(module.losses[-1], rel=EXACT, nan_ok=True)
        except RuntimeError as error:
            assert "has no gradient" in str(error)
    return module, [text for text in told if "microbatches=1" in text]


def compared(loss: Loss, masks: Sequence[str], stages: int, **options: Any) -> tuple[str, list[str]]:
    """One of "equal", "warned" and "silent"; and what differs."""
    torch.set_default_dtype(torch.float64)
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


def compare_spellings(stages: int, schedule: str, names: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    options = {"microbatches": 4, "schedule": schedule}
    return {name: compared(ALL[name].loss, [ALL[name].mask], stages, **options) for name in names}


# Of ALL, which has each loss with two masks, one after the other.
SOME_OF_ONE_MASK, SOME_OTHERS, SOME, EVERY = slice(0, None, 8), slice(1, None, 20), slice(0, None, 3), slice(None)


@pytest.mark.parametrize(
    ("stages", "schedule", "chosen"),
    [
        (1, "1f1b", SOME_OF_ONE_MASK),
        (2, "1f1b", SOME_OTHERS),
        *thorough((1, "1f1b", EVERY), (2, "1f1b", SOME), (2, "gpipe", SOME), (2, "zbv", SOME)),
    ],
)
def test_every_spelling_is_equal_or_warned_of(pool: WorkerPool, stages: int, schedule: str, chosen: slice) -> None:
    names = [*ALL][chosen]
    found = pool.run(compare_spellings, stages, stages, schedule, names, init=False)[0]
    assert not {name: why for name, (what, why) in found.items() if what == "silent"}
    wrong = {name: why for name, (what, why) in found.items() if what == "warned"}
    assert len(wrong) <= 0.15 * len(names), wrong


def compare_idioms(start: int, microbatches: int, every: int) -> dict[str, tuple[str, list[str]]]:
    """Some, with another sequence of masks."""
    return {
        f"{name}: {', '.join(masks)}": compared(loss, masks, 1, microbatches=microbatches)
        for i, (name, loss) in enumerate([*IDIOMS.items()][::every])
        for masks in [SEQUENCES[(i + start) % len(SEQUENCES)]]
    }


@pytest.mark.parametrize(
    ("start", "microbatches", "every"), [(0, 4, 3), *thorough(*((i, k, 1) for i in range(9) for k in (4, 8)))]
)
def test_no_later_batch_is_silently_different(pool: WorkerPool, start: int, microbatches: int, every: int) -> None:
    found = pool.run(compare_idioms, 1, start, microbatches, every, init=False)[0]
    assert not {name: why for name, (what, why) in found.items() if what == "silent"}
    assert sum(what == "equal" for what, _ in found.values()) >= 0.3 * len(found)


class Learned(nn.Module):
    """A loss with learned factors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.loss = LEARNED[name]
        self.factors = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x: Tensor, z: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return self.loss(self.factors, x, z, m)


# What counts in the batches of a run, of which the last isn't split evenly: microbatches may have one sample.
OF_LEARNED = ("all", "five samples"), ("some", "all", "some of five samples")
OF_OTHERS = ("a sample has none", "five samples"), ("one microbatch", "some of five samples")


def compare_unevenly_split(learned: bool, stages: int, every: int, **options: Any) -> dict[str, list[str]]:
    """What differs, by the names of losses."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in [*(LEARNED if learned else OF_SAMPLES)][::every]:
        for masks in OF_LEARNED if learned else OF_OTHERS:
            loss = Learned(name) if learned else OF_SAMPLES[name]
            what, why = compared(loss, masks, stages, **options)
            found[f"{name}: {', '.join(masks)}"] = [what, *why]
    return {name: why for name, why in found.items() if why != ["equal"]}


@pytest.mark.parametrize(
    ("learned", "stages", "every", "options"),
    [
        (False, 1, 2, {"microbatches": 8}),
        (True, 1, 3, {"microbatches": 4}),
        (True, 2, 6, {"microbatches": 4, "schedule": "zbv"}),
        *thorough(*((learned, stages, 1, {"microbatches": 8 // stages}) for learned in (0, 1) for stages in (1, 2))),
    ],
)
def test_numbers_of_samples_and_those_beside_a_mean_weigh_microbatches_as_in_one_process(
    pool: WorkerPool, learned: bool, stages: int, every: int, options: dict[str, Any]
) -> None:
    assert pool.run(compare_unevenly_split, stages, learned, stages, every, init=False, **options)[0] == {}
