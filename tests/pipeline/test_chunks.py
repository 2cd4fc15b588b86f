"""Several chunks a stage, run by real processes: whatever the lists, loss and gradients are those of one process."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
    needed,
    placement,
    sent,
)
from lightning_parallel.schedules.checks import of_one_update
from lightning_parallel.schedules.generators import Generator, interleaved
from lightning_parallel.schedules.simulate import peak_activations
from lightning_parallel.schedules.v_shaped import zbv
from tests.pipeline.nets import BLOCKS
from tests.pipeline.test_engine import BATCHES, Rank, assert_equal, double, joined, model_of, rows, whole_batch
from tests.pool import WorkerPool
from tests.thorough import thorough

LAYERS = {**BLOCKS, "balance": "layers"}


_LAYERS = 8  # of the model: there are no more chunks


def any_order(stages: int, microbatches: int, seed: int) -> Schedule:
    """Valid lists without any plan: two or three chunks a stage anywhere, of which one that can run is drawn each
    time; backwards whole or in halves."""
    draw = random.Random(seed)
    places = [stage for stage in range(stages) for _ in range(draw.choice([2, 3]))][:_LAYERS]
    places.remove(stages - 1)
    draw.shuffle(places)
    places.append(stages - 1)  # the last chunk
    chunks = len(places)
    lists: Schedule = [[] for _ in range(stages)]
    halved = {(chunk, k): draw.random() < 0.5 for chunk in range(chunks) for k in range(microbatches)}
    kinds: tuple[type[Any], ...] = (Forward, BackwardInput, BackwardWeight)
    due = {(kind, chunk): 0 for kind in kinds for chunk in range(chunks)}
    done: set[Any] = {None}
    while any(number < microbatches for number in due.values()):
        ready: list[tuple[Any, Action]] = []
        for (kind, chunk), k in due.items():
            if k == microbatches:
                continue
            action = kind(chunk, k)
            before = {BackwardInput: Forward, BackwardWeight: BackwardInput}.get(kind)
            if needed(action, chunks) in done and (before is None or before(chunk, k) in done):
                ready.append(((kind, chunk), action))
        place, action = draw.choice(ready)
        due[place] += 1
        done |= {action, sent(action, chunks)}
        assert not isinstance(action, Step)
        whole = not halved[action.chunk, action.microbatch]
        if whole and isinstance(action, BackwardWeight):
            continue
        if whole and isinstance(action, BackwardInput):
            action = Backward(action.chunk, action.microbatch)
        lists[places[action.chunk]].append(action)
    for stage, actions in enumerate(lists):
        actions.append(Step(stage, 0))
    return lists


def trained(kind: str, generator: Generator, batches: list[list[int]], options: dict[str, Any]) -> list[Any]:
    """For each batch losses and gradients; the buffers at the end."""
    stages = torch.distributed.get_world_size()
    rank = Rank(kind, options={**options, "placement": placement(generator(stages, 2))})
    results = []
    for seed, sizes in enumerate(batches):
        actions = of_one_update(generator, stages, len(sizes))[rank.layout.stage]
        losses = rank.engine.run(actions, rank.work(rows(sum(sizes), seed), sizes))
        assert rank.engine.activations_held == 0
        rank.model.eval()
        with torch.inference_mode():
            evaluated = rank.engine.evaluate(partial(rank.model.step, rows(3)))
        rank.model.train()
        assert (evaluated is not None) == rank.layout.is_last_stage
        results.append(([loss.item() for loss in losses], rank.gradients()))
    return [results, {name: b.detach().clone() for name, b in rank.stage.named_buffers().items()}]


def check(pool: WorkerPool, kind: str, stages: int, generator: Generator, batches: list[list[int]]) -> None:
    """Against a loop over the microbatches in one process."""
    ranks = pool.run(trained, stages, kind, generator, batches, LAYERS)
    with double():
        model = model_of(kind)
        for i, sizes in enumerate(batches):
            losses, expected = whole_batch(model, sizes, i, split=True)
            found = [loss * size / sum(sizes) for loss, size in zip(ranks[0][0][i][0], sizes, strict=True)]
            assert found == pytest.approx(losses, rel=0, abs=1e-12), i
            gradients = joined([rank[0][i][1] for rank in ranks])
            for name in gradients.keys() - expected.keys():
                assert not gradients.pop(name).any(), name
            assert_equal(gradients, expected)
        buffers: dict[str, Tensor] = {}
        for rank in ranks:
            buffers |= rank[1]
        assert_equal(buffers, dict(model.named_buffers()))


KINDS = ["Tuples", "Frozen", "Loose", "InPlace", "SkipChanged", "SameTwice", "MultiExit"]


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("Shifted", 2),
        ("Summed", 2),
        ("PassesThrough", 2),  # weights cross, and get no gradient
        ("Checkpointed", 2),
        ("Mixed", 3),
        ("DeepUNet", 3),  # its skips stay on their stages
        *thorough(*((kind, 2) for kind in (*KINDS, "Tied", "UNet", "Cycle", "MixedWithBatchNorm")), ("Mixed", 1)),
    ],
)
def test_gradients_in_a_v_equal_one_process_s(pool: WorkerPool, kind: str, stages: int) -> None:
    batches = [[1] * 8, [1] * 8] if kind == "Shifted" else BATCHES
    check(pool, kind, stages, zbv, batches)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("Mixed", 1), ("DeepUNet", 2), *thorough(*((kind, k) for kind in ("Mixed", "DeepUNet") for k in range(3, 20)))],
)
def test_any_valid_lists_give_the_same_numbers(pool: WorkerPool, kind: str, seed: int) -> None:
    stages = 2 + seed % 2
    check(pool, kind, stages, partial(any_order, seed=seed), [[3, 3, 2, 2, 2], [4, 4, 3], [1]])


def breadth_first(stages: int, microbatches: int) -> Schedule:
    """All forwards of a chunk, then those of the stage's next chunk, then the backwards."""
    lists: Schedule = []
    for s in range(stages):
        forwards: list[Action] = [Forward(c, k) for c in (s, s + stages) for k in range(microbatches)]
        backwards: list[Action] = [Backward(c, k) for c in (s + stages, s) for k in range(microbatches)]
        lists.append([*forwards, *backwards, Step(s, 0)])
    return lists


def test_chunks_to_which_no_gradient_comes_back_hold_nobody_up_within_a_batch(pool: WorkerPool) -> None:
    check(pool, "FrozenFirst", 2, breadth_first, [[1] * 8, [1] * 8])


def measured(generator: Generator, count: int) -> tuple[int, int, int]:
    """Of one batch on this rank: the activations held at most, and the parameters whose gradients came in a second half
    and in all."""
    stages = torch.distributed.get_world_size()
    rank = Rank("Net", options={**LAYERS, "placement": placement(generator(stages, 2))})
    late: set[str] = set()
    second = False
    for name, parameter in rank.parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: late.add(name) if second else None)  # type: ignore[misc]
    for chunk in rank.engine._chunks.values():

        def second_half(number: int, *, completes: bool, run: Any = chunk.second_half) -> None:
            nonlocal second
            second = True
            run(number, completes=completes)
            second = False

        chunk.second_half = second_half  # type: ignore[method-assign]
    rank.engine.run(generator(stages, count)[rank.layout.stage], rank.work(rows(count), [1] * count))
    assert rank.engine.activations_held == 0
    return max(rank.held), len(late), len(rank.parameters)


def test_what_is_held_and_what_waits_is_what_the_lists_say(pool: WorkerPool) -> None:
    for generator, count in ((interleaved, 4), (interleaved, 6), (zbv, 6)):
        last, first = pool.run(measured, 2, generator, count)
        assert [first[0], last[0]] == peak_activations(generator(2, count))
        # Of a block, weight and bias: the weight waits. Chunk 0, with the stem, is on the last stage in a V.
        assert [first[1], last[1]] == ([2, 2] if generator is zbv else [0, 0]), (first, last)
