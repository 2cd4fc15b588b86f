"""recipes/models/: the example models learn, log what they promise, and do what they say."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from recipes import build
from recipes.models.gpt import GPT
from recipes.models.optimizer import configure, warmup, warmup_cosine
from tests.recipes.runs import composed

ADAM = {"_target_": "torch.optim.AdamW", "lr": 1e-2}


def small_gpt(**options: Any) -> GPT:
    defaults = {"vocab_size": 11, "context": 6, "layers": 2, "heads": 2, "width": 8}
    return GPT(optimizer=ADAM, **{**defaults, **options})


def test_gpt_sees_no_token_after_the_one_it_predicts() -> None:
    model = small_gpt().eval()
    tokens = torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    assert torch.equal(model(tokens)[:, :4], model(changed)[:, :4])
    assert not torch.equal(model(tokens)[:, 4:], model(changed)[:, 4:])


@pytest.mark.parametrize("name", ["gpt", "mlp", "lenet"])
def test_models_log_the_losses_in_every_step(name: str, tmp_path: Any) -> None:
    data = "data=digits" if name != "gpt" else "data=text"
    small = ["data.context=16", f"data.path={__file__}", "data.batch_size=2"] if name == "gpt" else []
    config = composed(f"model={name}", data, *small)
    datamodule = build.data(config)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, limit_val_batches=1, limit_test_batches=1, num_sanity_val_steps=0,
        val_check_interval=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=tmp_path,
    )  # fmt: skip
    model = build.model(config)
    trainer.fit(model, datamodule)
    accuracy = set() if name == "gpt" else {"val_acc"}
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"} | accuracy
    trainer.test(model, datamodule, verbose=False)
    assert "test_loss" in trainer.callback_metrics


def test_hyperparameters_are_plain_so_that_checkpoints_open_safely() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return type(value) is dict and all(map(plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or type(value) in (str, int, float, bool)

    for name in ("gpt", "mlp", "lenet"):
        model = build.model(composed(f"model={name}", "scheduler=cosine"))
        assert model.hparams and all(map(plain, model.hparams.values())), name


def test_schedules_rise_linearly_then_fall_to_the_floor() -> None:
    assert [warmup(step, warmup_steps=3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = [warmup_cosine(s, warmup_steps=3, total_steps=13, floor=0.1) for s in range(16)]
    assert cosine[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in zip(cosine[3:13], cosine[4:14], strict=True))
    assert cosine[13:] == pytest.approx([0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="scheduler.name='linear' is not known: use 'constant' or 'cosine'"):
        configure([nn.Parameter(torch.zeros(1))], ADAM, {"name": "linear"})
