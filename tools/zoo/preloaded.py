"""Imported once, by the server that the zoo's worker processes are forked from."""

from __future__ import annotations

import importlib
import importlib.util

import tools.workers.torchvision_ops  # noqa: F401  before Lightning, which imports torchvision

for name in (
    "torch._dynamo", "torch.distributed.checkpoint", "lightning.pytorch", "lightning_parallel", "torchvision",
    "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "timm", "diffusers", "peft",
):  # fmt: skip
    if importlib.util.find_spec(name.split(".")[0]) is not None:
        importlib.import_module(name)
