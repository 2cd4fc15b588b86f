"""How much Python runs for each action of a schedule, counted in calls: on a GPU the host must launch faster than the
device computes.

One stage of three runs in this process, on the meta device, where nothing is computed. Its neighbours are played: what
they announce is there at once, and nothing else is sent.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.cuts.search import partition
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.announced import AnnouncedReceiver, AnnouncingSender
from lightning_parallel.messages.message import encode, format_of
from lightning_parallel.pipeline.chunk import Chunk, Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.groups import Wire, Wires
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import Action, Step, placement
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.named import SCHEDULES

CPU = torch.device("cpu")
STAGES, STAGE, MICROBATCHES, WIDTH = 3, 1, 6, 8
FORMAT = format_of([torch.ones(2, WIDTH, requires_grad=True)])

# The most calls that each kind of action may make, by schedule: a little above the present numbers. A chunk of ZB-V has
# two layers, a stage of the other schedules four.
LAYERS = {"absent layer": 25, "own layer": 25}
MESSAGES = {"received": 19, "sent": 31}
AT_MOST = {
    "1f1b": {**LAYERS, **MESSAGES, "forward": 56, "backward": 55},
    "zbv": {**LAYERS, **MESSAGES, "own layer": 39, "forward": 56, "backward input": 205, "backward weight": 56},
    "async": {**LAYERS, **MESSAGES, "forward": 76, "backward": 75},
}


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(4 * STAGES)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Done:
    """A message that has arrived."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Device:
    """The group in which a neighbour's device sends and receives."""

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> Done:
        return Done()

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Done:
        buffers[0].zero_()
        return Done()


class Host(Device):
    """The group in which its host announces messages of one format, which it describes ``new`` times."""

    def __init__(self, new: int) -> None:
        self._new = new
        self._descriptions: deque[Tensor] = deque()

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> Done:
        (buffer,) = buffers
        if self._descriptions:
            buffer.copy_(self._descriptions.popleft())
            return Done()
        if self._new:
            self._new -= 1
            self._descriptions.append(encode(FORMAT))
        size = sum(description.numel() for description in self._descriptions)
        buffer.view(torch.int64).copy_(torch.tensor([size, 0]))  # the words of an announcement
        return Done()


class Calls:
    """Counts calls of Python functions, by what they are made for: the innermost of some known functions.

    Args:
        own: the numbers of the stage's layers.
    """

    def __init__(self, own: set[int]) -> None:
        self.calls: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self._own = own
        self._within = ["the rest"]
        self._kinds: dict[CodeType, Callable[[dict[str, Any]], str]] = {
            Chunk.forward.__code__: lambda given: "forward",
            Chunk.backward.__code__: lambda given: "backward input" if given["in_halves"] else "backward",
            Chunk.second_half.__code__: lambda given: "backward weight",
            AnnouncingSender.send.__code__: lambda given: "sent",
            AnnouncedReceiver.take.__code__: lambda given: "received",
            Layer.__call__.__code__: lambda given: "own layer" if given["self"].number in self._own else "absent layer",
            Layer.forward.__code__: lambda given: "the layer itself",
        }

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        kind = self._kinds.get(frame.f_code)
        if event == "return" and kind is not None:
            self._within.pop()
        if event == "call":
            if kind is not None:
                self._within.append(kind(frame.f_locals))
                self.times[self._within[-1]] += 1
            self.calls[self._within[-1]] += 1


def counted(name: str) -> dict[str, float]:
    """The mean number of calls for each kind of action in a batch that comes after others."""
    lists = None if name == "async" else SCHEDULES[name](STAGES, MICROBATCHES)
    net, x = Net(), torch.zeros(2, WIDTH)
    parts = partition(
        net,
        lambda: net(x).square().mean(),
        STAGES,
        layers=["layers.*"],
        placement=None if lists is None else placement(lists),
        balance="layers",
    )
    stage = Stage(net, parts, STAGE, CPU)
    stage.flow = stage.flow_of(lambda: net(x).square().mean())
    stage.install()
    links = Wires()
    for cut, ends in enumerate(zip(parts.placement, parts.placement[1:], strict=False)):
        if STAGE in ends and len({*ends}) == 2:
            links.activations[cut] = Wire(Device(), 2 * cut, Host(MICROBATCHES))  # type: ignore[arg-type]
            links.gradients[cut] = Wire(Device(), 2 * cut + 1, Host(0))  # type: ignore[arg-type]
    layout = Layout.resolve(STAGES, STAGE, pipeline=STAGES)
    versions = WeightVersions(net, stage.named_parameters()) if lists is None else None
    with patch.object(dist, "get_group_rank", lambda group, rank: rank):
        weights = None if versions is None else {STAGE: versions}
        engine = Engine(stage, layout, links, CPU, loss_of=lambda loss: loss, weights=weights)
    endless = AsyncOneFOneB(STAGES, STAGE)

    def update() -> None:
        assert versions is not None
        versions.take_gradients()
        versions.update(lambda: None)

    def batch(number: int) -> None:
        loss, last = BatchLoss([2] * MICROBATCHES), MICROBATCHES - 1
        first = number * MICROBATCHES if lists is None else 0
        work = {
            first + k: Microbatch(lambda: net(x).square().mean(), 1.0, loss, index=k, seed=k, ends_batch=k == last)
            for k in range(MICROBATCHES)
        }
        net.zero_grad()
        actions: list[Action] = [*endless.feed(MICROBATCHES)] if lists is None else [*lists[STAGE]]
        if lists is not None:
            actions = [action for action in actions if not isinstance(action, Step)]
        engine.run(actions, work, update=update, more_follow=lists is None)

    for number in range(3):
        batch(number)
    found = Calls({int(name.split(".")[1]) for name in stage.layers})
    sys.setprofile(found.note)
    try:
        batch(3)
    finally:
        sys.setprofile(None)
    return {kind: found.calls[kind] / times for kind, times in found.times.items()}


@pytest.mark.parametrize("name", AT_MOST)
def test_an_action_takes_no_more_python_than_it_did(name: str) -> None:
    found = counted(name)
    del found["the layer itself"]
    assert found.keys() == AT_MOST[name].keys()
    assert {kind: calls for kind, calls in found.items() if calls > AT_MOST[name][kind]} == {}
