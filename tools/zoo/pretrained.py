"""Entries of transformers' classes, from their names and the settings of a small configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
import transformers
from transformers import PretrainedConfig

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import VOCABULARY, OwnLoss, classes, tokens


def entry(
    name: str,
    model: str,
    batch: Callable[[], Any],
    *,
    wrap: Callable[[Any], L.LightningModule] = OwnLoss,
    layers: int = 4,
    by_nature: Nature | None = None,
    drops: bool = False,
    dtype: torch.dtype = torch.float64,
    prepare: Callable[[Any], Any] = lambda model: None,
    **settings: Any,
) -> Entry:
    """An entry for a model of transformers.

    Args:
        name: as in `Entry`, and so are batch, layers, by_nature and dtype.
        model: the name of its class.
        wrap: makes the LightningModule around it.
        drops: whether the configuration's dropout stays.
        prepare: called with the model.
        settings: of the configuration.
    """

    def module() -> L.LightningModule:
        kind = getattr(transformers, model)
        config = kind.config_class(**settings)
        if not drops:
            drop_nothing(config)
        made = kind(config)
        prepare(made)
        return wrap(made)

    return Entry(name, "transformers", module, batch, layers, by_nature, dtype)


def drop_nothing(config: PretrainedConfig) -> None:
    """Set every probability of dropout to zero, and those of layer drop and of masks over the input."""
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            drop_nothing(value)
        elif isinstance(value, float) and ("drop" in key or key.startswith("mask_") and key.endswith("_prob")):
            setattr(config, key, 0.0)


def language() -> dict[str, torch.Tensor]:
    """Tokens that are their own labels."""
    ids = tokens(vocabulary=VOCABULARY)
    return {"input_ids": ids, "labels": ids}


def unequal_labels() -> dict[str, torch.Tensor]:
    """As `language`, but padded: samples have 4 to 12 tokens, and no labels for the others."""
    batch = language()
    lengths = torch.randint(4, batch["input_ids"].shape[1] + 1, (8, 1))
    mask = torch.arange(batch["input_ids"].shape[1]) < lengths
    return {**batch, "attention_mask": mask.long(), "labels": batch["labels"].where(mask, -100)}


def translation() -> dict[str, torch.Tensor]:
    """Tokens, and other tokens as labels."""
    return {"input_ids": tokens(vocabulary=VOCABULARY), "labels": tokens(8, VOCABULARY)}


def classification() -> dict[str, torch.Tensor]:
    """Tokens with a class."""
    return {"input_ids": tokens(vocabulary=VOCABULARY), "labels": classes()}
