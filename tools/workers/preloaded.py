"""Imported once, by the server that the workers are forked from."""

from __future__ import annotations

import gc
import importlib

gc.disable()  # what is imported stays: each collection of garbage would look at all of it

import tools.workers.torchvision_ops  # noqa: E402, F401  before Lightning, which imports torchvision

for name in (
    "torch._dynamo",  # the first optimizer imports it
    *("torch.distributed.checkpoint", "torchmetrics", "lightning.pytorch", "pytest", "lightning_parallel"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
):
    importlib.import_module(name)
gc.freeze()
gc.enable()
