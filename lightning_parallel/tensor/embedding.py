"""The embedding table divided over the vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.private.torch.modules import move_forward_hooks
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import ParallelLayer, Site, check_plain


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """``nn.Embedding`` with the rows of the table divided over the ranks.

    It takes ids ``[...]``, equal on all ranks, and returns ``[..., embedding_dim]``, equal on all ranks. Each rank
    looks up the ids that it holds; it returns zeros for the others, and the results are summed. The row of
    ``padding_idx``, which is an id of the whole vocabulary, gets no gradient. Hooks on the outputs of the ``whole``,
    such as that of transformers' gradient checkpointing, are the new layer's, too.

    Raises:
        ValueError: ``whole`` is something else, or more, than a table; or a rank would get no rows.
    """

    def __init__(self, whole: Any, site: Site | dist.ProcessGroup) -> None:
        problem = None
        if not isinstance(whole, nn.Embedding):
            problem = "is not nn.Embedding"
        elif whole.max_norm is not None:
            problem = f"has max_norm={whole.max_norm}, which rewrites rows while it looks them up"
        elif whole.scale_grad_by_freq:
            problem = "has scale_grad_by_freq=True"
        elif whole.sparse:
            problem = "has sparse=True: gradients are dense here"
        check_plain(whole, nn.Embedding, ["weight"], problem, keeps_forward_hooks=True)
        super().__init__(whole, site)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx = whole.padding_idx
        # Nothing but these is taken; adapters ask for them.
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, whole.norm_type, False, False
        self.hold_shard("weight", whole.weight, 0)
        [(self._start, self._stop)] = self.shards["weight"].ranges()
        padding = self.padding_idx
        self._padding = padding - self._start if padding is not None and self._start <= padding < self._stop else None
        move_forward_hooks(whole, self)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids.

        Raises:
            IndexError: an id isn't in the vocabulary, on all ranks alike. On a GPU the look-up's own assertion fails.
        """
        # Only ids that another rank holds are replaced: an id outside the vocabulary is outside the shard's rows, too.
        elsewhere = ((ids >= 0) & (ids < self._start)) | ((ids >= self._stop) & (ids < self.num_embeddings))
        rows = F.embedding((ids - self._start).masked_fill(elsewhere, 0), self.weight, self._padding)
        return functions.reduce_(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.site.group)
