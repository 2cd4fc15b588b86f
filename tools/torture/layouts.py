"""The layouts of the matrix: how a user asks for them, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT = 20  # seconds that a rank waits for another


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy and a number of processes.

    Args:
        name: of the layout, in tables and for the command line.
        overrides: for ``recipes.train``.
        ranks: processes.
        all_write: each rank writes a part of a checkpoint; else the first one writes all of it.
        drains: for a save, so that the numbers depend on when a run is saved.
    """

    name: str
    overrides: tuple[str, ...]
    ranks: int = 2
    all_write: bool = True
    drains: bool = False

    @property
    def options(self) -> list[str]:
        """The command line's part that is the layout's."""
        return [*self.overrides, f"cluster.devices={self.ranks}"]


_WAIT = f"strategy.timeout={TIMEOUT}"
_EVEN = "strategy.balance=layers"  # a probe on each stage

LAYOUTS = (
    Layout("single", ("strategy=single",), ranks=1, all_write=False),
    Layout("ddp 2", ("strategy=ddp", _WAIT), all_write=False),
    Layout("fsdp 2", ("strategy=fully_sharded", _WAIT)),
    Layout("tensor 2", ("strategy=tensor_parallel", _WAIT)),
    Layout("1F1B 2", ("strategy=pipeline_1f1b", _EVEN, _WAIT)),
    Layout("ZB-V 2", ("strategy=pipeline_zbv", _EVEN, _WAIT)),
    Layout("async 2", ("strategy=pipeline_async", _EVEN, _WAIT), drains=True),
    Layout("1F1B 2 x data 2", ("strategy=pipeline_1f1b", "strategy.stages=2", _EVEN, _WAIT), ranks=4),
)
