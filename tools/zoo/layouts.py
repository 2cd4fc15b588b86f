"""The layouts that the zoo's models are trained under, and what each is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

import lightning_parallel as lp
from tools.zoo.entry import Nature

TIMEOUT = 25.0  # seconds that a rank waits for another; longer than any entry trains
MICROBATCHES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy, its settings and a number of ranks.

    Args:
        name: of the layout, in tables and for the command line.
        strategy: its class.
        options: of its constructor.
        ranks: processes.
        stages: in how many parts the model is cut.
        shares: whether each rank gets a share of the batch, as with replicas.
        fallback: the layout with which entries are compared that differ by nature from the plain Trainer on the whole
            batch; None: there is no such layout.
        natures: what makes an entry differ by nature here.
    """

    name: str
    strategy: type[Strategy]
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    stages: int = 1
    shares: bool = False
    fallback: str | None = None
    natures: frozenset[Nature] = frozenset()

    def make(self, layers: tuple[str, ...] = ()) -> Strategy | str:
        """The strategy, for a Trainer; a pipeline with these layers, if any are given."""
        given: dict[str, Any] = {"layers": list(layers)} if layers else {}
        return "auto" if self.strategy is SingleDeviceStrategy else self.strategy(**self.options, **given)


def _pipeline(name: str, stages: int, **options: Any) -> Layout:
    return Layout(
        name,
        lp.PipelineStrategy,
        {"stages": stages, "microbatches": MICROBATCHES, "timeout": TIMEOUT, **options},
        ranks=stages,
        stages=stages,
        fallback=None if stages == 1 else ONE_STAGE,
        natures=frozenset(Nature) - {Nature.LABELS},  # microbatches are weighted by their labels
    )


def _tensor(name: str, ranks: int, **options: Any) -> Layout:
    return Layout(
        name,
        lp.TensorParallelStrategy,
        {"tensor_parallel": ranks, "timeout": TIMEOUT, **options},
        ranks=ranks,
        natures=frozenset({Nature.DRAWS}),
    )


PLAIN, ONE_STAGE, REPLICAS = "plain", "one stage", "replicas"

LAYOUTS = (
    _pipeline("GPipe 2", 2, schedule="gpipe"),
    _pipeline("1F1B 2", 2),
    _pipeline("1F1B 4", 4),
    _pipeline("interleaved 2", 2, schedule="interleaved"),
    _pipeline("ZB-V 2", 2, schedule="zbv"),
    _pipeline("recomputed 2", 2, activation_checkpointing=True),
    _tensor("tensor 2", 2),
    _tensor("sequence 2", 2, sequence_parallel=True),
    Layout(
        "fully sharded 2",
        lp.FullyShardedStrategy,
        {"timeout": TIMEOUT},
        ranks=2,
        shares=True,
        fallback=REPLICAS,
        natures=frozenset(Nature),
    ),
)
REFERENCES = (
    Layout(PLAIN, SingleDeviceStrategy),
    _pipeline(ONE_STAGE, 1),
    Layout(REPLICAS, DDPStrategy, {"find_unused_parameters": True}, ranks=2, shares=True),
)


def find(name: str, among: Iterable[Layout] = (*LAYOUTS, *REFERENCES)) -> Layout:
    """The layout or reference of a name.

    Raises:
        KeyError: there is none.
    """
    return {layout.name: layout for layout in among}[name]
