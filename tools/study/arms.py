"""What is compared, and by which rule each arm gets its learning rate: the plan, as pure functions of what is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from types import MappingProxyType
from typing import Any

from lightning_parallel.pipeline.staleness import Correction, Stashing
from lightning_parallel.schedules.named import Endless

OPTIMIZERS = ("adamw", "muon", "nadamw")
STAGES = (8, 4, 2)
# Tried on the first seed; neighbours differ by a factor of two, and so does what is tried beyond them.
RATES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "adamw": (3e-3, 6e-3, 1.2e-2),
        "muon": (6e-3, 1.2e-2, 2.4e-2),
        "nadamw": (3e-3, 6e-3, 1.2e-2),
        "soap": (3e-3, 6e-3, 1.2e-2),
    }
)
EXTENSIONS = 4  # at most, of the rates that are tried
TIE = 0.01  # first seeds' losses that differ by less don't decide between rates: seeds differ by as much


@dataclass(frozen=True)
class Setting:
    """What all arms share.

    Attributes:
        data: fingerprint of the task.
        layers, width: of the model.
        heads, context: of :class:`recipes.models.gpt.GPT`.
        batch: samples an update.
        updates: of each run.
        warmup: updates in which the rate rises linearly; then it falls as a cosine, to ``floor`` of the peak.
        clip: norm that each block's gradient is clipped to, embeddings with the first block and the head with the last:
            what a stage could do alone, whatever its number of blocks, so that all arms clip alike.
        every: updates between validations.
        windows: fixed samples that a validation reads.
        choice: fixed samples of the test split, by whose loss learning rates are chosen; 0: by the validation loss.
    """

    data: str
    layers: int = 8
    width: int = 64
    heads: int = 4
    context: int = 32
    batch: int = 16
    updates: int = 1000
    warmup: int = 200
    floor: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    every: int = 50
    windows: int = 512
    choice: int = 0


@dataclass(frozen=True)
class Arm:
    """One way to train. A single stage has no late gradients: that is the synchronous arm, for any p and m. In a V each
    stage has two chunks of layers."""

    optimizer: str
    stages: int = 1
    microbatches: int = 1
    weights: Stashing = "stash"
    correction: Correction = None
    schedule: Endless = "1f1b"

    @property
    def chunks(self) -> int:
        """Into which the model is cut."""
        return self.stages if self.schedule == "1f1b" else 2 * self.stages

    @property
    def synchronous(self) -> bool:
        return self.stages == 1


@dataclass(frozen=True)
class Run:
    """One training of one model."""

    setting: Setting
    arm: Arm
    rate: float
    seed: int

    @property
    def key(self) -> dict[str, Any]:
        """All that decides its result, as JSON has it. 1F1B is left out, so that older runs keep their names."""
        arm = {name: value for name, value in asdict(self.arm).items() if (name, value) != ("schedule", "1f1b")}
        return {"setting": asdict(self.setting), "arm": arm, "rate": self.rate, "seed": self.seed}


Losses = Mapping[Run, float]  # by which rates are chosen, of the runs that are done; inf: it diverged


def arms(optimizers: Sequence[str], stages: Sequence[int]) -> Iterator[Arm]:
    """In the order in which they run: what the study is about comes first."""
    head = [name for name in optimizers if name != "nadamw"]
    groups = [(8, head), (8, [name for name in optimizers if name == "nadamw"])]
    groups += [(p, list(optimizers)) for p in STAGES if p != 8]
    begun: set[str] = set()
    for p, names in groups:
        if p not in stages:
            continue
        for name in names:
            if name not in begun:
                begun.add(name)
                yield Arm(name)
        for make, name in product(range(len(_asynchronous("", p))), names):
            yield _asynchronous(name, p)[make]


def _asynchronous(optimizer: str, p: int) -> list[Arm]:
    """The arms of p stages. 2BW needs as many microbatches as stages; one-sample updates are PipeDream's own way.
    Corrections are compared at the depth where they have most to do."""
    arms = [
        Arm(optimizer, p, 2 * p, "stash", "second_order"),
        Arm(optimizer, p, p, "stash", "second_order"),
        Arm(optimizer, p, 2 * p),
        Arm(optimizer, p, p),
        Arm(optimizer, p, 1),
        Arm(optimizer, p, p, "2bw"),
        Arm(optimizer, p, 1, "latest"),
    ]
    if p == max(STAGES):
        arms += [
            Arm(optimizer, p, 2 * p, "stash", "error_feedback"),
            Arm(optimizer, p, p, "stash", "error_feedback"),
            Arm(optimizer, p, p, "2bw", "second_order"),
        ]
    return arms


def tried(setting: Setting, arm: Arm, losses: Losses) -> tuple[list[float], float | None]:
    """Rates that the first seed is to run at as far as is known, and the chosen one once no more are wanted.

    As long as the best of them is the least or the greatest, the next beyond it is tried too.
    """
    rates = list(RATES[arm.optimizer])
    for extension in range(EXTENSIONS + 1):
        found = {rate: losses.get(Run(setting, arm, rate, 0)) for rate in rates}
        known = {rate: inf if loss is None else loss for rate, loss in found.items()}
        if None in found.values():
            return rates, None
        best = min(rates, key=lambda rate: known[rate])
        if best not in (rates[0], rates[-1]) or extension == EXTENSIONS:
            return rates, best
        rates = [best / 2, *rates] if best == rates[0] else [*rates, best * 2]
    raise AssertionError("the last extension returns")


def tied(setting: Setting, arm: Arm, losses: Losses) -> list[float]:
    """The rates whose loss on the first seed is as good as the best's, which all seeds run at; none yet: empty."""
    rates, best = tried(setting, arm, losses)
    if best is None:
        return []
    least = losses[Run(setting, arm, best, 0)]
    return [rate for rate in rates if rate == best or losses[Run(setting, arm, rate, 0)] <= least * (1 + TIE)]


def chosen(setting: Setting, arm: Arm, seeds: int, losses: Losses) -> float | None:
    """The arm's rate: of those tied, the best in the mean over the seeds that all of them have run."""
    rates = tied(setting, arm, losses)
    common = [seed for seed in range(seeds) if all(Run(setting, arm, rate, seed) in losses for rate in rates)]
    return min(rates, key=lambda rate: sum(losses[Run(setting, arm, rate, seed)] for seed in common), default=None)


def wanted(setting: Setting, arm: Arm, seeds: int, losses: Losses) -> list[Run]:
    """Runs of an arm, done or not, that are known to be needed: the rates first, then the other seeds."""
    rates, _ = tried(setting, arm, losses)
    first = [Run(setting, arm, rate, 0) for rate in rates]
    return first + [Run(setting, arm, rate, s) for rate in tied(setting, arm, losses) for s in range(1, seeds)]
