"""The fixtures that all tests share: the pool of workers, and double precision. A plugin of conftest.py's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import tools.workers.torchvision_ops  # noqa: F401  before Lightning, which imports torchvision where it is installed
from lightning_parallel.ranks import process_group
from tools.workers.pool import WorkerPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's worker processes: see tools/workers/pool.py. They start with the first call. A session is one of
    those that pytest-xdist runs side by side."""
    workers = WorkerPool()
    yield workers
    workers.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _left_as_found() -> Iterator[None]:
    """What a file's tests set, and the group that their Trainers join, is not for the next file of this process. For
    example, a Trainer that ends before its tear-down leaves WORLD_SIZE set."""
    environment = dict(os.environ)
    yield
    torch.set_default_dtype(torch.float32)
    process_group.close()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    """Seeded, and float64 by default."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
