"""tensor/style.py: a style of the user's own, added through the one class, trains as the whole model does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor.layer import ParallelLayer, shard_parameter
from lightning_parallel.tensor.rules import resolve
from lightning_parallel.tensor.style import Plan, Rule, Site, Style
from tests.pool import WorkerPool
from tests.tensor.test_sharding import trains_as_the_whole

WIDTH, HIDDEN = 6, 10


class Gain(nn.Module):
    """A factor and an offset for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(features))
        self.offset = nn.Parameter(torch.zeros(()))  # one for all, so it can't be divided

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


class ShardedGain(ParallelLayer):
    def __init__(self, whole: Gain, site: Site) -> None:
        super().__init__()
        self.group = site.group
        self.shards = {"factor": Shard.of(whole.factor.shape, 0, site.group)}
        self.factor = shard_parameter(whole.factor, self.shards["factor"], site.shared)
        self.offset = whole.offset

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


class GainStyle(Style):
    """A gain on features that a column layer has left divided."""

    name = "gain"

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, Gain):
            raise ValueError(rule.misfit(": it is for Gain."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        assert isinstance(rule.module, Gain)
        return ShardedGain(rule.module, site)

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        assert isinstance(module, Gain)
        return [module.offset]


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.up, self.gain, self.down = nn.Linear(WIDTH, HIDDEN), Gain(HIDDEN), nn.Linear(HIDDEN, 11)

    def configure_tensor_parallel(self) -> Plan:
        return {"up": "column", "gain": GainStyle(), "down": "row"}

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.gain(self.up(self.embedding(tokens)))))
        return out


def gained_trains_as_the_whole() -> None:
    group = dist.group.WORLD
    assert group is not None
    trains_as_the_whole(Gained, group, False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_style_is_added_through_the_one_class(pool: WorkerPool, ranks: int) -> None:
    pool.run(gained_trains_as_the_whole, ranks)


def test_its_check_names_the_module_and_the_style() -> None:
    with pytest.raises(ValueError, match="plan: 'up': 'gain', but 'up' is a Linear: it is for Gain"):
        resolve(Gained(), {"up": GainStyle()})


def test_what_a_style_does_not_override_leaves_the_module_as_it_is() -> None:
    class Nothing(Style):
        pass

    style, module = Nothing.read(""), nn.Linear(2, 2)
    (rule,) = resolve(nn.Sequential(module), {"0": style})
    assert rule.style is style and style.text == "Nothing"
    assert style.partial_parameters(module) == []
    with pytest.raises(ValueError, match="takes no options"):
        Nothing.read("3")


class Scale(nn.Module):
    """What an identity expert is, with a parameter; its input comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Mixture(nn.Module):
    """Divided matrices, and a module that stays whole, in one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.kept = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T + self.kept(hidden=x)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixture, self.head = nn.Embedding(11, WIDTH), Mixture(), nn.Linear(WIDTH, 11)

    def configure_tensor_parallel(self) -> Plan:
        return {"mixture": "experts:up=0,down=1", "mixture.kept": "divide_output"}

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.mixture(self.embedding(tokens)))
        return out


def mixed_trains_as_the_whole() -> None:
    assert dist.group.WORLD is not None
    trains_as_the_whole(Mixed, dist.group.WORLD, False)


def test_what_stays_whole_in_a_sum_counts_once_also_if_called_by_keyword(pool: WorkerPool) -> None:
    pool.run(mixed_trains_as_the_whole, 2)
