"""A stage's step on a device whose values the host can't read: nothing in it asks for one.

The meta device stands for a GPU. It has shapes and no values, so whatever reads a value from it raises an error, where
a GPU would be waited for. Messages between stages carry nothing here, but are announced for real, between processes.
Where there is a GPU, torch itself looks for waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.cuts.search import partition
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.channel import Link
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.ranks.groups import Groups, Wire, Wires
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import Step, placement
from lightning_parallel.schedules.named import SCHEDULES
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

GPU = torch.device("meta")
STAGES, MICROBATCHES = 2, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(4))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Launched:
    """A message between devices: the host doesn't wait for it."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


class NoCopies(TorchFunctionMode):
    """Inside, what is in the host's memory isn't copied to the device: from memory that isn't pinned, that waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        on_host = not isinstance(args[0], Tensor) or args[0].device != GPU if args else False
        if func in (torch.tensor, torch.as_tensor, Tensor.to, Tensor.copy_) and on_host and found.device == GPU:
            raise AssertionError(f"{func.__name__} copies {args[0]} to the device")
        return found


class StageOnDevice:
    """This rank's stage of a pipeline, and a batch of it to run.

    Args:
        name: of the schedule.
        device: that the model is on.
        rewire: makes the links to use of those that its groups make.
    """

    def __init__(self, name: str, device: torch.device, rewire: Callable[[Wires], Wires]) -> None:
        layout = Layout.resolve(STAGES, dist.get_rank(), pipeline=STAGES)
        net = Net()
        ids = torch.zeros(3, 5, dtype=torch.int64)

        def step(ids: Tensor) -> Tensor:
            return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())

        lists = SCHEDULES[name](STAGES, MICROBATCHES)
        parts = partition(net, lambda: step(ids), STAGES, layers=["blocks.*"], placement=placement(lists))
        net.to(device)
        ids = ids.to(device)
        self.stage = Stage(net, parts, layout.stage, device)
        self.stage.flow = self.stage.flow_of(lambda: step(ids))
        self.stage.install()
        made = rewire(Groups(layout, device=device).wires(parts.placement))
        self._engine = Engine(self.stage, layout, made, device, loss_of=lambda loss: loss)
        self._actions = [action for action in lists[layout.stage] if not isinstance(action, Step)]
        self._step = lambda: step(ids)

    def run(self) -> None:
        loss, last = BatchLoss([1] * MICROBATCHES), MICROBATCHES - 1
        work = {
            k: Microbatch(step=self._step, scale=1.0, loss=loss, index=k, seed=k, ends_batch=k == last)
            for k in range(MICROBATCHES)
        }
        self._engine.run(self._actions, work)


def announced(links: Wires) -> Wires:
    """The same links, announced over gloo as over NCCL."""
    host = dist.new_group()
    return Wires(
        {cut: Wire(wire.group, wire.tag, host) for cut, wire in links.activations.items()},
        {cut: Wire(wire.group, wire.tag, host) for cut, wire in links.gradients.items()},
    )


def run(name: str) -> list[int]:
    """Two batches of a schedule on this rank's stage. Returns how many messages and announcements the second sends."""
    sent = [0, 0]
    isend, irecv = Link.isend, Link.irecv

    def send(link: Link, buffer: Tensor) -> Any:
        sent[buffer.device != GPU] += 1
        return Launched() if buffer.device == GPU else isend(link, buffer)

    def receive(link: Link, buffer: Tensor) -> Any:
        return Launched() if buffer.device == GPU else irecv(link, buffer)

    with patch.object(Link, "isend", send), patch.object(Link, "irecv", receive):
        stage = StageOnDevice(name, GPU, announced)
        stage.run()
        first = list(sent)
        with NoCopies():
            stage.run()
    assert all(p.grad is not None for p in stage.stage.named_parameters().values())
    return [both - one for both, one in zip(sent, first, strict=True)]


@pytest.mark.parametrize("name", ["1f1b", "zbv", *thorough("gpipe", "interleaved")])
def test_a_step_reads_no_value_from_its_device(pool: WorkerPool, name: str) -> None:
    """In the second batch each message has one announcement."""
    counts = pool.run(run, STAGES, name)
    crossing = MICROBATCHES * {"interleaved": 3, "zbv": 2}.get(name, 1)
    assert [sum(each) for each in zip(*counts, strict=True)] == [2 * crossing, 2 * crossing]


def run_watched(stage: StageOnDevice) -> None:
    """A batch, and a second one in which torch raises an error where the host waits for the GPU."""
    stage.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_on_one_gpu(name: str) -> None:
    run_watched(StageOnDevice(name, torch.device("cuda", 0), lambda links: links))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_on_a_gpu_torch_sees_no_wait_in_a_step(pool: WorkerPool, name: str) -> None:
    """Stages share the GPU, so that messages go through the host. torch sees reads and copies that wait; not that the
    host waits for a thread, which it does at the end of the batch, for the copies of what it sends last."""
    pool.run(run_on_one_gpu, STAGES, name)


def run_over_nccl(name: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    run_watched(StageOnDevice(name, device, lambda links: links))


@pytest.mark.gpu(STAGES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_over_nccl_torch_sees_no_wait_in_a_step(pool: WorkerPool, name: str) -> None:
    pool.run(run_over_nccl, STAGES, name, init=False)
