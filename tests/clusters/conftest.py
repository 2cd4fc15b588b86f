"""What the runs under all clusters are compared with."""

from __future__ import annotations

import pytest

import tools.workers.torchvision_ops  # noqa: F401  before Lightning
from tests.clusters.disturbed import numbers, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The numbers of the recipe on this machine, left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return numbers(folder)
