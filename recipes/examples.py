"""The example models and example data: the types and limits of their settings, and which data each model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from lightning_parallel.settings import Count, Natural, Range

Fraction = Annotated[float, Range(0, 1)]

# -- models ----------------------------------------------------------------------------------------------------------


@dataclass
class GPT:
    vocab_size: Annotated[int, Range(2)]
    context: Count
    layers: Count
    heads: Count
    width: Count
    dropout: Fraction
    tie_embeddings: bool


@dataclass
class MLP:
    features: Count
    classes: Annotated[int, Range(2)]
    width: Count
    layers: Count
    dropout: Fraction


@dataclass
class LeNet:
    channels: Count
    size: Annotated[int, Range(4)]
    classes: Annotated[int, Range(2)]


@dataclass
class HF:
    path: str | None
    lora: dict[str, Any] | None


@dataclass
class Timm:
    architecture: str | None
    pretrained: str | None
    classes: Annotated[int, Range(2)] | None
    arguments: dict[str, Any] | None


# -- data ------------------------------------------------------------------------------------------------------------


@dataclass
class Stdlib:
    directory: str
    context: Count
    val_windows: Count | None
    batch_size: Count
    workers: Natural


@dataclass
class Text:
    path: str | None
    context: Count
    val_windows: Count | None
    batch_size: Count
    workers: Natural


@dataclass
class Documents:
    path: str | None
    val_path: str | None
    tokenizer: str | None
    column: str | None
    context: Annotated[int, Range(2)]
    packing: bool
    directory: str
    batch_size: Count
    workers: Natural


@dataclass
class Digits:
    batch_size: Count
    workers: Natural


@dataclass
class Images:
    path: str | None
    size: Count
    mean: list[Fraction]
    std: list[Fraction]
    random_crop: bool
    random_flip: bool
    batch_size: Count
    workers: Natural
    classes: list[str] | None = None


# -- by name ---------------------------------------------------------------------------------------------------------

MODEL_SETTINGS: Mapping[str, type] = MappingProxyType({"gpt": GPT, "mlp": MLP, "lenet": LeNet, "hf": HF, "timm": Timm})
DATA_SETTINGS: Mapping[str, type] = MappingProxyType(
    {"stdlib": Stdlib, "text": Text, "digits": Digits, "hf": Documents, "images": Images}
)

# What example models take and example data give.
TAKES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt": ("bytes",),
        "hf": ("bytes", "documents"),
        "mlp": ("images",),
        "lenet": ("images",),
        "timm": ("images",),
    }
)
GIVES: Mapping[str, str] = MappingProxyType(
    {"stdlib": "bytes", "text": "bytes", "digits": "images", "images": "images", "hf": "documents"}
)

# The modules with parameters of an example model of so many layers: a stage without any learns nothing, and is refused.
MOST_STAGES: Mapping[str, Callable[[int], int]] = MappingProxyType(
    {"gpt": lambda layers: 6 * layers + 4, "mlp": lambda layers: layers + 1, "lenet": lambda layers: 5}
)


def example_of(node: Mapping[str, Any]) -> str:
    """The name of an example model or example data; empty for a class of the user's own, whose ``name`` is an argument
    like others."""
    return "" if node.get("_target_") is not None else str(node.get("name", ""))
