"""A loader that is resumed gives the batches that the other would have given next, and loads no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from lightning_parallel import ResumableDataLoader


class Numbers(Dataset):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


def epochs(loader: DataLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for _ in range(count) for batch in loader]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "workers": lambda: {"shuffle": True, "num_workers": 1},
    "weighted": lambda: {"sampler": WeightedRandomSampler(torch.ones(10).tolist(), 10)},
    "own generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "without batches": lambda: {"shuffle": True, "batch_size": None},
}


def made(kind: str) -> ResumableDataLoader:
    return ResumableDataLoader(Numbers(), **{"batch_size": 3, "collate_fn": torch.tensor, **KINDS[kind]()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_it_goes_on_where_it_was(kind: str, place: int) -> None:
    torch.manual_seed(0)
    loader = made(kind)
    epochs(loader, 1)
    batches = iter(loader)
    list(islice(batches, place))
    state = loader.state_dict()
    generator = torch.get_rng_state()
    expected = [batch.tolist() for batch in batches] + epochs(loader, 2)

    torch.manual_seed(1)
    resumed = made(kind)
    resumed.load_state_dict(state)
    rest = iter(resumed)
    torch.set_rng_state(generator)
    assert [batch.tolist() for batch in rest] + epochs(resumed, 2) == expected
    assert len(resumed) == len(loader)


@pytest.mark.parametrize(("place", "rest"), [(3, [6, 7, 8, 9]), (5, [*range(10)])])  # or the next epoch
def test_what_came_before_is_not_loaded_again(place: int, rest: list[int]) -> None:
    loader = ResumableDataLoader(Numbers(), batch_size=2)
    loader.load_state_dict({**loader.state_dict(), "place": place})
    assert sum(epochs(loader, 1), []) == loader.dataset.loaded == rest


def test_an_epoch_follows_from_the_default_generator() -> None:
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(epochs(ResumableDataLoader(Numbers(), batch_size=5, shuffle=True), 2))
    assert found[0] == found[1] != found[2] and found[0][:2] != found[0][2:]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(("dataset", "options", "message"), [
    (Stream(), {}, "Stream is an iterable dataset, in which a place can't be found by its number"),
    (Numbers(), {"sampler": iter(range(10))}, r"The sampler has no length \(__len__\)"),
])  # fmt: skip
def test_data_without_places_are_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableDataLoader(dataset, **options)


@pytest.mark.parametrize("place", [0, 2])
def test_workers_load_nothing_before_a_sampler_knows_the_epoch(place: int) -> None:
    def loader() -> ResumableDataLoader:
        sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0)
        return ResumableDataLoader(Numbers(), batch_size=2, sampler=sampler, num_workers=1)

    first = loader()
    first.sampler.set_epoch(3)
    batches = iter(first)
    list(islice(batches, place))
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    rest = iter(resumed)
    resumed.sampler.set_epoch(3)
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in batches]
