"""A sample of the zoo: no outcome is worse than that of the last whole run (`make zoo`)."""

from __future__ import annotations

import pytest

from tools.workers.pool import WorkerPool
from tools.zoo import layouts
from tools.zoo.outcome import Outcome
from tools.zoo.record import recorded
from tools.zoo.registry import entries
from tools.zoo.runner import Runner

SAMPLE = [
    ("gpt2", ["ZB-V 2", "tensor 2"]),
    ("llama, 2 key-value heads", ["sequence 2"]),
    ("bart", ["1F1B 2"]),
    ("mixtral", ["GPipe 2"]),
    ("two lists taking turns", ["1F1B 2"]),
    ("registered in another order", ["recomputed 2"]),
    ("metrics", ["1F1B 2"]),
]


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, chosen in SAMPLE for layout in chosen])
def test_no_worse_than_recorded(pool: WorkerPool, name: str, layout: str) -> None:
    ((room, entry),) = [(room, entry) for room, entry in entries() if entry.name == name]
    verdict = Runner(pool).run(room, entry, layouts.find(layout))
    assert verdict is not None
    expected = recorded().get(name, {}).get(layout, Outcome.REFUSED)
    assert not verdict.outcome.is_worse_than(expected), f"{verdict.outcome}, not {expected}: {verdict.detail}"
