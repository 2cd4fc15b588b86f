"""Imported once, by the server that the workers are forked from."""

from __future__ import annotations

import importlib

import tools.workers.torchvision_ops  # noqa: F401  before Lightning, which imports torchvision

NAMES = (
    "lightning_parallel.as_pytorch_lightning",  # before any package that imports pytorch_lightning
    *("torch._dynamo", "torch.distributed.checkpoint", "lightning.pytorch", "lightning_parallel"),
)
for name in NAMES:
    importlib.import_module(name)
