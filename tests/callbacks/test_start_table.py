"""The table at the start has each rank's place, part and memory by formula, and stays short with many ranks."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_parallel.callbacks.start_table import Holding, Row, row, state_bytes, table
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.local_model import LocalModel
from tests.strategies.harness import ALL, make_trainer
from tools.workers.pool import WorkerPool

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(("kind", "options"), [
    (optim.Adam, {"amsgrad": True}), (optim.AdamW, {}), (optim.NAdam, {}), (optim.RAdam, {}), (optim.Adamax, {}),
    (optim.Adadelta, {}), (optim.RMSprop, {}), (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (optim.Adagrad, {}), (optim.SGD, {"lr": 0.1}), (optim.SGD, {"momentum": 0.9}),
])  # fmt: skip
def test_an_optimizer_s_state_is_what_it_holds_after_a_step(kind: Any, options: dict[str, Any]) -> None:
    layer = nn.Linear(30, 20)
    layer.bias.requires_grad_(False)
    optimizer = kind(layer.parameters(), **options)
    layer(torch.ones(30)).sum().backward()
    optimizer.step()
    held = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    assert state_bytes(optimizer) == sum(value.nbytes for value in held if value.dim() == 2)


def test_memory_is_parameters_gradients_and_states_and_says_where_it_is_a_lower_bound() -> None:
    layer, layout = nn.Linear(64, 64, bias=False), Layout.resolve(1)  # 16 KiB
    optimizer = optim.Adam(layer.parameters())

    class Unknown(optim.Optimizer):
        pass

    def memory(optimizers: Any, extra: int | None = 0) -> int | str:
        return row(Holding("all", extra=extra), layout, CPU, LocalModel.of(layer), optimizers)["memory expected"]

    assert memory([optimizer]) == "64 KiB" and memory([optimizer], extra=2**20) == "1.06 MiB"
    assert memory(None) == "at least 16 KiB" and memory([optimizer], extra=None) == "at least 64 KiB"
    assert memory([Unknown(layer.parameters(), {})]) == "at least 32 KiB"


def test_a_long_table_has_one_row_for_ranks_that_hold_the_same() -> None:
    layout = Layout.resolve(64, tensor=2, data=16, pipeline=2)
    model = LocalModel.of(nn.Linear(5, 2, bias=False))
    rows: list[Row] = [
        row(Holding(f"part {each.stage}", extra=0), each, CPU, model, [])
        | {"host": f"node{rank // 8}", "device": f"cuda:{rank % 8}"}
        for rank, each in enumerate(layout.everyone())
    ]
    members = ["0 .. 15 (16)", "0 .. 1 (2)"]  # replicas and shards
    assert [re.split("  +", line.strip()) for line in table(rows).splitlines()] == [
        ["rank", "host", "device", "stage", "replica", "shard", "layers", "parameters", "memory expected"],
        ["0 .. 31 (32)", "node0 .. node3 (4)", "cuda:0 .. cuda:7 (8)", "1", *members, "part 1", "10", "0.0781 KiB"],
        ["32 .. 63 (32)", "node4 .. node7 (4)", "cuda:0 .. cuda:7 (8)", "0", *members, "part 0", "10", "0.0781 KiB"],
    ]
    odd = [each | {"parameters": "11"} if each["rank"] in (3, 4, 9) else each for each in rows]
    assert table(odd).splitlines()[2].strip().startswith("3 .. 9 (3)  node0")
    assert len(table(rows[:4]).splitlines()) == 5


def test_on_a_gpu_the_table_has_what_it_holds_outside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {GPU: 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {GPU: (70 * 2**30, 80 * 2**30)}[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    given: Any = (LocalModel.of(nn.Linear(5, 2)), [])
    rows = [row(Holding("all", extra=0), Layout.resolve(1), device, *given) for device in (GPU, CPU)]
    assert [each["outside PyTorch"] for each in rows] == ["7 GiB", ""]
    assert "outside PyTorch" in table(rows[:1]) and "outside PyTorch" not in table(rows[1:])


def told(strategy: str, model: str, options: dict[str, Any]) -> list[str]:
    texts: list[str] = []

    def listen(entry: logging.LogRecord) -> bool:
        texts.append(entry.getMessage())
        return True

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)  # workers of the pool are quiet
    logger.addFilter(listen)
    trainer = make_trainer(strategy, [], options, max_epochs=1)
    module, loader = ALL[model](), ALL[model].loader()
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    logger.removeFilter(listen)
    logger.setLevel(logging.NOTSET)
    return [text for text in texts if "memory expected" in text]


@pytest.mark.parametrize(("strategy", "model", "options", "members"), [
    ("tensor", "ShardableGPT2", {}, "shard"),
    ("sync", "Blocks", {"schedule": "zbv"}, "stage"),
    ("async", "LeNet", {}, "stage"),
])  # fmt: skip
def test_every_strategy_tells_once_for_an_evaluation_and_once_for_a_training(
    pool: WorkerPool, strategy: str, model: str, options: dict[str, Any], members: str
) -> None:
    first, second = pool.run(told, 2, strategy, model, options, init=False)
    assert second == []
    assert len(first) == 2  # the last validation needs no more
    for text in first:
        titles, *rows = text.splitlines()
        assert titles.split()[:5] == ["rank", "host", "device", members, "layers"] and len(rows) == 2
    assert first[0] != first[1]
    assert strategy != "async" or (rows[0].endswith("not late") and " late, corrected" in rows[1])
