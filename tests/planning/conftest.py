"""What the tests of plans share: this machine's device without its times, which take most of a plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tools.workers.torchvision_ops  # noqa: F401  before Lightning
from lightning_parallel.costs import devices, layer_costs, updates


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are tried once on this machine's device, and each is said to take a millisecond."""

    def once(works: Sequence[Callable[[], object]], device: Any, **kwargs: Any) -> list[float]:
        for work in works:
            work()
        return [1e-3] * len(works)

    for module in (devices, updates, layer_costs):
        monkeypatch.setattr(module, "seconds_of", once)
    monkeypatch.setattr(devices, "over_gloo", lambda: (1e-3, 1e9))
