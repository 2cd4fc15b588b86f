"""Parameters that a step changes itself change once a batch, however many microbatches it is called for."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.steps.once_a_batch import OnceABatch


def test_each_microbatch_finds_what_the_batch_would_find() -> None:
    module = nn.Linear(1, 1, bias=False)
    once = OnceABatch(module)
    for expected in (2.0, 4.0):  # two batches
        once.follow({"weight"}, 3)
        for _ in range(3):
            with once.around_run(), torch.no_grad():
                module.weight.copy_(torch.full((1, 1), expected) if expected == 2 else module.weight * 2)
        assert module.weight.item() == expected


def test_the_others_are_left_alone() -> None:
    module = nn.Linear(1, 1)
    once = OnceABatch(module)
    once.follow((), 2)
    nn.init.ones_(module.weight)
    with once.around_run():
        nn.init.zeros_(module.weight)
    with once.around_run():
        assert module.weight.item() == 0


def test_a_run_that_is_left_before_the_change_leaves_what_the_others_leave() -> None:
    module = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.ones_(module.weight)
    once = OnceABatch(module)
    once.follow({"weight"}, 3)
    with torch.no_grad():
        with once.around_run():
            pass  # an earlier chunk
        assert module.weight.item() == 1
        with once.around_run():
            assert module.weight.item() == 1
            module.weight.mul_(2)
        with once.around_run():
            assert module.weight.item() == 1
        assert module.weight.item() == 2


def test_what_an_earlier_backward_reads_stays_where_the_step_replaces_a_tensor() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    once = OnceABatch(module)
    once.follow({"weight"}, 2)
    read = []
    for _ in range(2):
        with once.around_run():
            module.weight.data = module.weight.data * 2
            read.append(module.weight.data)
    assert [tensor.item() for tensor in read] == [2, 2] == [2, module.weight.item()]
