"""Example models: ordinary LightningModules in plain PyTorch, with nothing about parallelism in them.

``MODELS`` maps the ``name`` of a config under conf/model to where the class is. It holds names, not classes,
so that reading it costs no import of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "gpt": "recipes.models.gpt.GPT",
        "mlp": "recipes.models.mlp.MLP",
        "lenet": "recipes.models.lenet.LeNet",
        "hf": "recipes.models.hf.CausalLM",
        "timm": "recipes.models.timm.TimmClassifier",
    }
)
