"""A step of several passes in a pipeline: every rank has the prediction of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.passes import Passes
from tests.pool import WorkerError, WorkerPool
from tests.thorough import thorough

PLAN = {"blocks.*.0": "column", "blocks.*.2": "row"}
STRATEGIES: dict[str, Any] = {
    "single": lambda: "auto",
    "1f1b": lambda: lp.PipelineStrategy(stages="auto"),
    "zbv": lambda: lp.PipelineStrategy(schedule="zbv"),
    "interleaved": lambda: lp.PipelineStrategy(schedule="interleaved"),
    "async": lambda: lp.AsyncPipelineStrategy(),
    "both": lambda: lp.PipelineStrategy(stages=2, tensor_parallel=2, plan=PLAN),
    "fully sharded": lambda: lp.PipelineStrategy(stages=2, data_parallel=2, data_parallel_kind="fully_shard"),
}


class Writer(L.LightningModule):
    """Goes on with the most likely token. A text ends by itself, so microbatches make different numbers of passes."""

    def __init__(self, returned: str = "tokens") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))
        self.head = nn.Linear(16, 20)
        self.returned = returned

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).cumsum(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def _next(self, tokens: Tensor) -> Any:
        chosen = self(tokens)[:, -1].argmax(-1)
        return {"tokens": chosen, "a list": [chosen]}[self.returned]

    @lp.in_passes
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Passes:
        tokens = batch["tokens"]
        for _ in range(int(batch["wanted"].max())):
            new = yield lambda tokens=tokens: self._next(tokens)
            tokens = torch.cat([tokens, new[:, None]], dim=1)
        padded = torch.full((len(tokens), 20), -1)
        padded[:, : tokens.shape[1]] = tokens
        return {"tokens": padded, "passes": batch["wanted"]}


def predict(strategy: str, ranks: int, returned: str = "tokens") -> list[Any]:
    torch.set_default_dtype(torch.float64)
    rows = torch.arange(40).reshape(10, 4) % 20
    wanted = torch.tensor([1, 2, 3, 4, 5, 6, 1, 6, 2, 3])
    samples = [{"tokens": row, "wanted": number} for row, number in zip(rows, wanted, strict=True)]
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=STRATEGIES[strategy](), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    made = trainer.predict(Writer(returned), DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    assert made is not None
    return [{key: value.tolist() for key, value in batch.items()} for batch in made]  # type: ignore[union-attr]


@pytest.mark.parametrize(("strategy", "ranks"), [
    ("1f1b", 3), ("zbv", 2), ("both", 4),
    *thorough(("interleaved", 2), ("async", 2), ("fully sharded", 4), ("1f1b", 2)),
])  # fmt: skip
def test_every_rank_predicts_what_one_process_does(pool: WorkerPool, strategy: str, ranks: int) -> None:
    (expected,) = pool.run(predict, 1, "single", 1, init=False)
    assert len(expected) == 3
    # The number of passes goes by the largest of a microbatch, so what is beyond a row's own number may be missing.
    for batches in pool.run(predict, ranks, strategy, ranks, init=False):
        for batch, whole in zip(batches, expected, strict=True):
            assert batch["passes"] == whole["passes"]
            for row, reference, wanted in zip(batch["tokens"], whole["tokens"], whole["passes"], strict=True):
                assert row[: 4 + wanted] == reference[: 4 + wanted]


def test_what_a_pass_returns_has_to_be_a_tensor(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="predict_step returned a list"):
        pool.run(predict, 2, "1f1b", 2, "a list", init=False)
