"""What the runs under all clusters are compared with."""

from __future__ import annotations

import json

import pytest
from filelock import FileLock

from tests.clusters.disturbed import numbers, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, float]:
    """The numbers of the recipe on this machine, left alone. It is run once for all of pytest-xdist's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "undisturbed"
    known = folder / "numbers.json"
    with FileLock(f"{folder}.lock"):
        if not known.exists():
            train(folder)
            known.write_text(json.dumps(numbers(folder)))
    return json.loads(known.read_text())  # type: ignore[no-any-return]
