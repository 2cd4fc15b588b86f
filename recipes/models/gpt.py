"""A decoder-only transformer language model (GPT-2's shape: pre-norm, learned positions, GELU)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from recipes.models.language_model import LanguageModel
from recipes.models.optimizer import configure


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which position t sees positions 0..t.

    Shapes: [batch, time, width] -> the same.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        # As many heads as there are: under tensor parallelism a rank has some of them.
        q, k, v = self.qkv(x).view(batch, time, 3, -1, self.head_size).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(LanguageModel):
    """Next-token model; the loss is the mean cross entropy in nats per token.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: tokens the model sees at most.
        layers: blocks.
        heads: attention heads; must divide ``width``.
        width: size of the hidden state.
        dropout: probability, after attention weights and after each half of a block.
        tie_embeddings: the output layer shares the token embedding's weight (Press & Wolf 2017). Off by
            default: the asynchronous pipeline refuses weights shared by two stages.

    A batch is ``(tokens, targets)``, both int64 [batch, time].
    """

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        vocab_size: int = 256,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.heads={heads} does not divide model.width={width}: choose one that does")
        self.save_hyperparameters()
        self.optimizer = dict(optimizer)
        self.scheduler = dict(scheduler) if scheduler else None
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise(layers)
        if tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal, deviation 0.02, smaller by sqrt(2 x layers) where a layer adds to the residual."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, vocab_size] of the token after each of ``tokens`` [batch, time]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def configure_tensor_parallel(self) -> dict[str, str]:
        """Heads, hidden units and vocabulary are divided over the ranks of a tensor group."""
        return {
            "token_embedding": "embedding",
            "blocks.*.attention.qkv": "column:3",
            "blocks.*.attention.out": "row",
            "blocks.*.mlp.0": "column",
            "blocks.*.mlp.2": "row",
            "head": "column_gather",
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.blocks.parameters() if parameter.ndim == 2]
        return configure(self.parameters(), self.optimizer, self.scheduler, matrices)
