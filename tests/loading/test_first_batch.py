"""A batch before training: of the user's own loader, which gives the same batches afterwards, and is made once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from lightning_parallel import PipelineStrategy
from lightning_parallel.loading.first_batch import trial_of
from lightning_parallel.loading.read_ahead import ReadAhead
from tests.strategies.harness import make_trainer

ROWS = torch.arange(24, dtype=torch.float32).view(12, 2)


def looking() -> PipelineStrategy:
    """One stage, which looks at the first step because it counts layers."""
    return PipelineStrategy(microbatches=1, balance="layers")


class Goes(IterableDataset[Any]):
    """Goes on where it was left, each time it is iterated; with ``noise`` it draws, as each part of an epoch."""

    def __init__(self, noise: bool) -> None:
        self.rows, self.noise = iter([*ROWS, *ROWS]), noise

    def __iter__(self) -> Iterator[Tensor]:
        for row in islice(self.rows, 8):
            yield row + torch.rand(2) if self.noise else row


class Own:
    """A loader that isn't torch's."""

    def __init__(self, noise: bool) -> None:
        self.rows = Goes(noise)

    def __iter__(self) -> Iterator[Tensor]:
        for row in self.rows:
            yield row[None]


class ItsOwnIterator:
    """A loader that rewinds itself, as mlcolvar's."""

    def __init__(self) -> None:
        self.batches = iter(ROWS.split(4))

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> ItsOwnIterator:
        self.batches = iter(ROWS.split(4))
        return self

    def __next__(self) -> Tensor:
        return next(self.batches)


class Once(ItsOwnIterator):
    """Is not rewound."""

    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Once:
        return self


class Random(torch.utils.data.Dataset[Tensor]):
    """Augments: draws whenever it is read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index] + torch.rand(2)


class Draws:
    """A sampler that isn't torch's, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=self.generator).tolist())


class Noisy(Random):
    """Draws from generators of its own, counts what it gives, and knows its sampler, which knows it."""

    def __init__(self) -> None:
        self.generator, self.count = np.random.default_rng(0), 0
        self.torchs = torch.Generator().manual_seed(0)
        self.sampler = SequentialSampler(self)

    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        return ROWS[index] * (self.count / 100) + self.generator.random() + torch.rand((), generator=self.torchs)


class Closes(Random):
    """Closes what it has opened."""

    def __init__(self) -> None:
        self.file = {"open": True}

    def __del__(self) -> None:
        self.file["open"] = False

    def __getitem__(self, index: int) -> Tensor:
        assert self.file["open"]
        return ROWS[index]


class Net(L.LightningModule):
    def __init__(self, loader: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.loader = loader
        self.asked = 0
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(self.loader)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        rows = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        return self.layers(rows).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(kind: str) -> Any:
    rows = TensorDataset(ROWS)
    generator = torch.Generator().manual_seed(3)
    made = {
        "plain": lambda: DataLoader(rows, batch_size=4),
        "shuffled": lambda: DataLoader(rows, batch_size=4, shuffle=True),
        "own generator": lambda: DataLoader(rows, batch_size=4, shuffle=True, generator=generator),
        "augmented": lambda: DataLoader(Random(), batch_size=4, shuffle=True),
        "drawn batches": lambda: DataLoader(rows, batch_sampler=BatchSampler(Draws(), 4, False)),
        "noisy": lambda: DataLoader(Subset(Noisy(), range(11, -1, -1)), batch_size=4),
        "closes": lambda: DataLoader(Closes(), batch_size=4),
        "noisy slices": lambda: DataLoader(Goes(noise=True), batch_size=4),
        "own noisy slices": lambda: Own(noise=True),
        "its own iterator": ItsOwnIterator,
        "once": Once,
        "two own": lambda: [Own(noise=True), Own(noise=True)],
        "several": lambda: {"a": DataLoader(ROWS, batch_size=4, shuffle=True), "b": DataLoader(ROWS, batch_size=4)},
    }
    return made[kind]()


def trainer_with(strategy: Any, epochs: int = 1) -> L.Trainer:
    return make_trainer("single", [], {}, max_epochs=epochs, strategy=strategy)


def trained(kind: str, strategy: Any, net: type[Net] = Net) -> Net:
    L.seed_everything(1)
    module = net(kind)
    trainer_with(strategy, epochs=2).fit(module)
    return module


@pytest.mark.parametrize("kind", [
    "own generator", "augmented", "noisy", "closes", "several", "drawn batches", "noisy slices", "own noisy slices",
    "its own iterator", "once", "two own",
])  # fmt: skip
def test_training_sees_the_batches_that_it_would_have_seen(kind: str) -> None:
    expected = trained(kind, "auto")
    module = trained(kind, looking())
    torch.testing.assert_close(module.seen, expected.seen, rtol=0, atol=0)
    assert module.asked == expected.asked == 1


class Hooked(Net):
    """Notes when its loader is made. Skips a batch, and draws random numbers."""

    validation_step = on_train_epoch_start = None  # type: ignore[assignment]

    def __init__(self, loader: str) -> None:
        super().__init__(loader)
        self.called: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.dropout(super().training_step(batch, batch_idx))
        return None if batch_idx == 1 else loss

    def train_dataloader(self) -> Any:
        self.called.append("train_dataloader")
        return super().train_dataloader()

    def on_fit_start(self) -> None:
        self.called.append("on_fit_start")


class InPlace(Net):
    """Changes its batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch.mul_(0.5)


def test_a_look_leaves_a_batch_that_is_put_back_as_it_was() -> None:
    """It would change it once more."""
    # These slices are new tensors.
    expected, found = (trained("own noisy slices", strategy, InPlace).seen for strategy in ("auto", looking()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_first_batch_is_let_go_when_it_has_been_given() -> None:
    loader = Own(noise=False)
    ahead = ReadAhead(loader)
    next(iter(ahead))
    ahead.hand_on()
    batches = iter(loader)
    first = weakref.ref(next(batches))
    assert next(batches) is not None and first() is None


class FailsOnce(Net):
    failed = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self.failed:
            self.failed = True
            raise ValueError("no luck")
        return super().configure_optimizers()


def test_after_an_error_at_set_up_the_module_is_asked_for_its_loaders_again() -> None:
    trainer = trainer_with(looking())
    module = FailsOnce("plain")
    with pytest.raises(ValueError, match="no luck"):
        trainer.fit(module)
    module.loader, module.seen = "shuffled", []
    trainer.fit(module)
    assert module.asked == 2 and module.seen


def test_a_step_that_optimizes_by_hand_is_not_run_ahead() -> None:
    module = Net("plain")
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match="with manual optimization it can't be run ahead"):
        trial_of(SimpleNamespace(trainer=None, module=module))  # type: ignore[arg-type]


def test_a_loader_that_cannot_give_its_first_batch_again_is_refused() -> None:
    given = (ROWS[i : i + 4] for i in range(0, 12, 4))
    with pytest.raises(ValueError, match="A loader of training_step is a generator"):
        trainer_with(looking()).fit(Net("plain"), {"a": DataLoader(ROWS, batch_size=4), "b": given})
    with pytest.raises(ValueError, match="The loader of training_step gives no batch"):
        trainer_with(looking()).fit(Net("plain"), DataLoader(ROWS[:0], batch_size=4))


def test_one_rank_without_a_look_is_one_process() -> None:
    """So it asks for loaders when one process does, can do without a batch, and lets a step skip one."""
    seen = []
    weights = []
    for strategy in ("auto", PipelineStrategy()):
        trainer = trainer_with(strategy)
        L.seed_everything(1)
        module = Hooked("plain")
        trainer.fit(module)
        trainer.fit(module, DataLoader(ROWS[:0], batch_size=4))
        seen.append(module.called)
        weights.append(module.state_dict())
    assert seen[1] == seen[0] and len(seen[0]) == 3
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


class Pairs(Net):
    """Takes no dataloader_idx, since its loaders are read together."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.seen.append(batch)
        self.layers(batch["b"])


def test_an_evaluation_may_read_its_loaders_together() -> None:
    seen = []
    for strategy in ("auto", looking()):
        module = Pairs("plain")
        loaders = {"a": [0, 1, 2], "b": DataLoader(ROWS, batch_size=6)}  # a list is a loader too
        trainer_with(strategy).validate(module, CombinedLoader(loaders, "min_size"), verbose=False)
        seen.append(module.seen[-2:])
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
