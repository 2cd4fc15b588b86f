"""What the arms of a study train: data, a model of equal blocks, and the page's words for them.

The loss is the mean cross entropy of classes, for every task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from tools.study.arms import Setting

Split: TypeAlias = Literal["val", "test"]


class Chain(NamedTuple):
    """A model, in the order in which its layers are called: each takes what the one before it gives."""

    before: nn.Module
    blocks: Sequence[nn.Module]
    after: nn.Module


@dataclass(frozen=True)
class Words:
    """What a study's page says of its task.

    Attributes:
        model: and what it is trained on.
        samples: that a validation reads, in the plural.
        drawn: where a batch's samples come from.
        held_out: where those of the validation come from.
        apart: where those come from by which rates are chosen.
        unit: of the loss.
        limits: what of the task makes the study a small one.
        unused: settings that it has no use for.
    """

    model: str
    samples: str
    drawn: str
    held_out: str
    apart: str
    unit: str
    limits: str
    unused: frozenset[str] = frozenset()


class Task(Protocol):
    """It is handed to the processes of the runs, so it can be pickled, and holds no data itself."""

    @property
    def words(self) -> Words: ...

    def fingerprint(self) -> str:
        """Of all that decides the batches besides the setting and the seed; the data is made where it is missing."""
        ...

    def chain(self, setting: Setting) -> Chain:
        """The model, initialised by torch's generator."""
        ...

    def batches(self, setting: Setting, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for each update, the same for every arm: inputs [batch, ...], and the classes of the outputs."""
        ...

    def held_out(self, setting: Setting, split: Split, count: int) -> tuple[Tensor, Tensor]:
        """At most ``count`` samples of data that isn't trained on, always the same: inputs, and classes."""
        ...
