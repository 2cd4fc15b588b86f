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
class Loaded:
    batch_size: Count
    workers: Natural


@dataclass
class _Bytes(Loaded):
    context: Count
    val_windows: Count | None


@dataclass
class Stdlib(_Bytes):
    directory: str


@dataclass
class Text(_Bytes):
    path: str | None


@dataclass
class Documents(Loaded):
    path: str | None
    val_path: str | None
    tokenizer: str | None
    column: str | None
    context: Annotated[int, Range(2)]
    packing: bool
    directory: str


@dataclass
class Images(Loaded):
    path: str | None
    size: Count
    mean: list[Fraction]
    std: list[Fraction]
    random_crop: bool
    random_flip: bool
    classes: list[str] | None = None


# -- by name ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """An example model, or example data.

    Attributes:
        target: its class, by name: reading this table imports none.
        settings: the dataclass of its settings.
        data: the kinds of data that the model takes, or the kind that the data are.
        most_stages: how many modules of a model with so many layers have parameters. A stage without any learns
            nothing, and is refused. None: not known.
    """

    target: str
    settings: type
    data: tuple[str, ...]
    most_stages: Callable[[int], int] | None = None


MODELS: Mapping[str, Example] = MappingProxyType(
    {
        "gpt": Example("recipes.models.gpt.GPT", GPT, ("bytes",), lambda layers: 6 * layers + 4),
        "mlp": Example("recipes.models.classifier.MLP", MLP, ("images",), lambda layers: layers + 1),
        "lenet": Example("recipes.models.classifier.LeNet", LeNet, ("images",), lambda layers: 5),
        "hf": Example("recipes.models.hf.CausalLM", HF, ("bytes", "documents")),
        "timm": Example("recipes.models.timm.TimmClassifier", Timm, ("images",)),
    }
)
DATA: Mapping[str, Example] = MappingProxyType(
    {
        "stdlib": Example("recipes.data.text.StdlibData", Stdlib, ("bytes",)),
        "text": Example("recipes.data.text.TextData", Text, ("bytes",)),
        "digits": Example("recipes.data.digits.DigitsData", Loaded, ("images",)),
        "hf": Example("recipes.data.hf.HFData", Documents, ("documents",)),
        "images": Example("recipes.data.images.ImageData", Images, ("images",)),
    }
)


def example_of(node: Mapping[str, Any]) -> str:
    """The name of an example model or example data; empty for a class of the user's own, whose ``name`` is an argument
    like others."""
    return "" if node.get("_target_") is not None else str(node.get("name", ""))


def given(data: Mapping[str, Any]) -> str | None:
    """The kind of example data; None for data of the user's own."""
    found = DATA.get(example_of(data))
    return found.data[0] if found is not None else None
