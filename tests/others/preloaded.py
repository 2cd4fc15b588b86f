"""Imported once, by the server that the workers are forked from."""

from __future__ import annotations

import importlib

import tests.zoo.torchvision_ops  # noqa: F401  before Lightning, which imports torchvision
from tests.others import alias

alias.install()
for name in ("torch._dynamo", "torch.distributed.checkpoint", "lightning.pytorch", "lightning_parallel", "pytest"):
    importlib.import_module(name)
