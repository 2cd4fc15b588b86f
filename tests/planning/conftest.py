"""What the tests of plans share: this machine's device without its times, which take most of a plan's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_parallel.planning import devices, layer_costs, updates


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are tried once on this machine's device, and each is said to take a millisecond."""

    def once(work: Callable[[], object], device: Any, **kwargs: Any) -> float:
        work()
        return 1e-3

    for module in (devices, layer_costs, updates):
        monkeypatch.setattr(module, "seconds_of", once)
    monkeypatch.setattr(devices, "over_gloo", lambda: {"message": (1e-3, 1e9)})
