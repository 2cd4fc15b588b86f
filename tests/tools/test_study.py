"""tools/study: what is run together, and the parts, change no number; the clock's formulas, by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_parallel.pipeline.staleness import Correction, Stashing
from lightning_parallel.schedules.generators import one_f_one_b
from lightning_parallel.schedules.named import Endless, asynchronous
from lightning_parallel.schedules.simulate import simulate
from recipes.data.sources import stdlib
from recipes.models.gpt import GPT
from recipes.models.optimizer import warmup_cosine
from tools.study import clock
from tools.study.arms import Arm, Run, Setting
from tools.study.delayed import Delayed
from tools.study.text import Text
from tools.study.train import execute, forward, loss_of, optimizer_of, parts

TINY = Setting("none", layers=4, width=8, heads=2, context=8, batch=8, updates=6, warmup=2, every=3, windows=5)


def write_text(folder: Path) -> Text:
    """A small text, written in the form of recipes.data.sources."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for split, length in (("train", 600), ("val", 200), ("test", 200)):
        random.integers(97, 105, length, dtype=np.uint8).tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"content": "of the tests"}))
    return Text(stdlib, "the tests", made=folder)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(("microbatches", "weights", "correction", "schedule"), [
    (8, "stash", "second_order", "1f1b"),
    (4, "2bw", "second_order", "1f1b"),
    (1, "latest", None, "1f1b"),
    (4, "stash", "second_order", "vmin"),
])  # fmt: skip
def test_microbatches_together_give_the_numbers_of_one_at_a_time(
    microbatches: int, weights: Stashing, correction: Correction, schedule: Endless, tmp_path: Path
) -> None:
    task = write_text(tmp_path)

    def trained(together: bool) -> dict[str, Tensor]:
        chain = parts(task, TINY, 4, seed=1)
        names = [dict(part.named_parameters()) for part in chain]
        optimizers = [optimizer_of("adamw", stage, TINY) for stage in names]
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = 0.01
        late = Delayed(names, weights=weights, correction=correction, schedule=schedule)
        for x, y in task.batches(TINY, seed=1):
            readings = late.feed(microbatches)
            if together:
                late.backward(readings[0], loss_of(forward(chain, readings, x), y))
            else:
                for reading, mine, theirs in zip(readings, x.chunk(microbatches), y.chunk(microbatches), strict=True):
                    for part, leaves in zip(chain, reading.stages, strict=True):
                        mine = functional_call(part, dict(leaves), (mine,))
                    late.backward(reading, loss_of(mine, theirs), weight=1 / microbatches)
            late.update(lambda stage: optimizers[stage].step())
        return {name: p.detach() for stage in names for name, p in stage.items()}

    one, other = trained(True), trained(False)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12)


def by_hand(setting: Setting, rate: float, seed: int, task: Text) -> list[float]:
    """Validation losses of the model trained by a plain loop."""
    torch.manual_seed(seed)
    model = GPT(optimizer={}, context=setting.context, layers=setting.layers, width=setting.width, heads=setting.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=setting.weight_decay)
    first = nn.ModuleList([model.token_embedding, model.position_embedding, model.blocks[0]])
    last = nn.ModuleList([model.blocks[-1], model.norm, model.head])
    assert task.made is not None
    held_out = torch.from_numpy(np.fromfile(task.made / "val.bin", np.uint8))
    windows = (len(held_out) - 1) // setting.context
    starts = [i * windows // setting.windows * setting.context for i in range(setting.windows)]
    validation = torch.stack([held_out[start : start + setting.context + 1] for start in starts]).long()
    losses = []
    for update, (x, y) in enumerate(task.batches(setting, seed)):
        optimizer.param_groups[0]["lr"] = rate * warmup_cosine(
            update, warmup_steps=setting.warmup, total_steps=setting.updates, floor=setting.floor
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        for block in (first, *model.blocks[1:-1], last):
            nn.utils.clip_grad_norm_(block.parameters(), setting.clip)
        optimizer.step()
        if (update + 1) % setting.every == 0:
            with torch.no_grad():
                logits = model(validation[:, :-1])
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), validation[:, 1:].flatten()).item())
    return losses


def test_the_synchronous_arm_is_a_plain_training_loop(tmp_path: Path) -> None:
    setting = replace(TINY, clip=0.05)  # some blocks' gradients are longer, some shorter
    task = write_text(tmp_path)
    result = execute(Run(setting, Arm("adamw"), 0.01, 2), task)
    expected = by_hand(setting, 0.01, 2, task)
    assert [updates for updates, _ in result["curve"]] == [3, 6]
    assert [loss for _, loss in result["curve"]] == pytest.approx(expected, rel=0, abs=1e-12)
    assert result["final"] == result["final_read"] == result["curve"][-1][1]


LEAST, MOST = {(4, 8): 0.6, (8, 16): 0.5}, {(4, 8): 0.9, (8, 16): 0.8}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    late = dict.fromkeys(("async", "vhalf", "vmin"), MOST)
    monkeypatch.setattr(clock, "MEASURED", {"1f1b": LEAST, "zbv": MOST, **late})


def test_an_update_takes_as_long_as_was_measured_and_of_other_sizes_as_theory_has_it() -> None:
    assert clock.synchronous("1f1b", 8, 16, 1) == pytest.approx(1 / 0.5)
    assert clock.synchronous("zbv", 4, 8, 10) == pytest.approx(10 / 0.9)
    assert clock.asynchronous(8, 16, 1000) == pytest.approx((1000 + 7 / 16) / 0.8)  # it is filled once
    for shape, busy in (("vmin", 0.906), ("vhalf", 0.970)):  # in a V the last stage waits for each batch
        assert clock.theory(shape, 8, 16) == pytest.approx(busy, abs=1e-3)
    for schedule, kept in (("zbv", max), ("vmin", min)):  # the least is lost where synchronous, the most where not
        shares = [share / clock.theory(schedule, *sizes) for sizes, share in MOST.items()]
        assert clock.busy(schedule, 6, 12) == pytest.approx(clock.theory(schedule, 6, 12) * kept(shares))


@pytest.mark.parametrize(("stages", "microbatches"), [(8, 16), (4, 4), (2, 1)])
def test_theory_is_the_schedules(stages: int, microbatches: int) -> None:
    f, b, updates = 1.0, 2.0, 5
    batch = microbatches * (f + b)  # the unit
    flushed = simulate(one_f_one_b(stages, microbatches), f, b)
    assert batch / flushed.makespan == pytest.approx(clock.theory("1f1b", stages, microbatches))
    assert clock.theory("1f1b", stages, microbatches) < clock.theory("zbv", stages, microbatches) <= 1
    endless = simulate(asynchronous(stages, microbatches, updates), f, b).makespan
    used = clock.asynchronous(stages, microbatches, 1) - clock.asynchronous(stages, microbatches, 0)
    assert endless / batch * used == pytest.approx(clock.asynchronous(stages, microbatches, updates))


def test_a_loss_is_reached_between_two_validations() -> None:
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert clock.reached(curve, 3.25) == 87.5
    assert clock.reached(curve, 2.5) == pytest.approx(150 + 50 * 2 / 3)
    assert clock.reached(curve, 2.0) == 200
    assert clock.reached(curve, 5.0) == 50
    assert clock.reached(curve, 1.9) is None
    assert clock.reached([], 1.9) is None
