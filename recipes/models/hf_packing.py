"""Whether a model of transformers can be trained on rows of documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recipes.data.hf import HFData
from recipes.models.hf_folder import takes


def check_fit(model: Any, data: HFData) -> None:
    """Refuse data that a model can't be trained on.

    Args:
        model: of transformers, whole.
        data: set up.

    Raises:
        ValueError: the data have tokens that the model doesn't know; or documents share rows, and the model lets one
            document see another, or has positions that go by the longest one.
    """
    known = model.get_input_embeddings().num_embeddings
    if data.vocabulary > known:
        raise ValueError(
            f"data.tokenizer={data.tokenizer}: it has {data.vocabulary} tokens, and the model knows {known}: name the "
            f"folder of the model's own tokenizer."
        )
    limit = rope_limit(model.config)
    if data.packing and limit is not None and data.context > limit:
        raise ValueError(
            f"data.packing=true: in rows of more than {limit} tokens the positions of this model (rope_type) go by the "
            f"longest document in the batch: use data.packing=false, or data.context={limit}."
        )
    if data.packing and not _keeps_documents_apart(model):
        raise ValueError(
            f"data.packing=true: a {type(model).__name__} lets a document in a row see the ones before it, whatever "
            f"their positions are: use data.packing=false."
        )


def _keeps_documents_apart(model: nn.Module) -> bool:
    """Is what the model says of a document the same, whatever document is before it in the row? It is tried with two
    rows that differ in the first document only."""
    if not takes(model, "position_ids"):
        return False
    lengths = (24, 40)
    row = torch.arange(sum(lengths))[None] % 50
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    other = torch.cat([row[:, : lengths[0]].flip(1), row[:, lengths[0] :]], dim=1)
    modes = {part: part.training for part in model.modules()}
    model.eval()  # draws nothing
    with torch.no_grad():
        said = [model(input_ids=tokens, position_ids=positions, use_cache=False).logits for tokens in (row, other)]
    for part, training in modes.items():
        part.training = training
    one, two = (logits[:, lengths[0] :].float() for logits in said)
    # Experts get the tokens of both documents in one product, which may be rounded otherwise.
    rounding = 4 * torch.finfo(said[0].dtype).eps * one.abs().max()
    return bool((one - two).abs().max() <= max(rounding, 1e-4 * one.abs().max()))


def rope_limit(config: Any) -> int | None:
    """The length up to which each token's position is its own: beyond it, some models scale positions by the longest
    text in the batch. None for models that don't."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    for each in kinds:
        if each.get("rope_type") in ("longrope", "dynamic"):
            known = each.get("original_max_position_embeddings")
            return int(known or config.max_position_embeddings)
    return None
