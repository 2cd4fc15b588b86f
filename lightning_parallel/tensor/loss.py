"""Cross entropy of logits that are divided over the vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3).

For one row with logits z over a vocabulary of V, target c, smoothing e and m = max_j z_j::

    loss   = log sum_j exp(z_j - m)  -  [ (1 - e) (z_c - m) + e / V sum_j (z_j - m) ]
    dz_j   = softmax(z)_j - (1 - e) [j = c] - e / V

The ranks exchange only the maximum and the two sums over j: three numbers a row, in two all-reduces. The gradient of a
rank's logits needs no message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor.functions import all_reduced, has_memory


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of the whole logits, which are never put together.

    Args:
        logits: ``[..., vocabulary here]``, this rank's, as a :class:`ColumnParallelLinear
            <lightning_parallel.tensor.linear.ColumnParallelLinear>` without ``gather_output`` returns them. The
            vocabulary comes last, not second as in ``F.cross_entropy``.
        target: ``[...]`` ids in the whole vocabulary, equal on all ranks.
        group: the tensor group, over whose ranks the vocabulary is divided.
        vocab_size: the size of the whole vocabulary. It says where this rank's logits begin. It also tells gathered
            logits from divided ones; the loss of gathered ones would be too large by the logarithm of the number of
            ranks.
        ignore_index: rows with this target add nothing to the loss, and don't count in its mean.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: the share of the target's probability that is spread evenly over all ids, from 0 to 1.

    Returns:
        The loss, equal on all ranks: a scalar, or ``[...]`` for reduction "none". Its dtype is float32 at least.

    Raises:
        ValueError: shapes that don't fit each other, targets that are probabilities, or an unknown setting.
        IndexError: a target isn't in the vocabulary. On a GPU an assertion of the kernel fails.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: must be between 0 and 1.")
    if target.is_floating_point():
        raise ValueError(f"Targets of dtype {target.dtype}: probabilities are not supported, only ids.")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)}, the vocabulary last, need targets of shape "
            f"{tuple(logits.shape[:-1])}, not {tuple(target.shape)}."
        )
    shard = Shard.of((vocab_size,), 0, group)
    if logits.shape[-1] != shard.size:
        gathered = " These are the whole logits: leave out gather_output." if logits.shape[-1] == vocab_size else ""
        raise ValueError(
            f"Logits for {logits.shape[-1]} ids, but rank {shard.index} of {shard.count} tensor ranks has {shard.size} "
            f"of vocab_size={vocab_size}.{gathered}"
        )

    rows, ids = logits.reshape(-1, shard.size), target.reshape(-1).long()  # [rows, vocabulary here], [rows]
    counts = ids != ignore_index
    wrong = counts & ((ids < 0) | (ids >= vocab_size))
    if ids.device.type == "cpu" and has_memory(ids) and wrong.any():  # a GPU would have to be waited for
        raise IndexError(f"Target {int(ids[wrong][0])} is not in a vocabulary of vocab_size={vocab_size}.")
    [(start, stop)] = shard.ranges()
    here = (ids >= start) & (ids < stop)
    index = torch.where(here, ids - start, 0).masked_fill(wrong, vocab_size)  # for the assertion of a GPU's kernel
    loss = _CrossEntropy.apply(rows, index, here, counts, vocab_size, label_smoothing, group)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss ``[rows]`` of logits ``[rows, vocabulary here]``; 0 for rows that don't count.

    ``index`` is the target's place among the logits here, in the rows where it is ``here``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        index: Tensor,
        here: Tensor,
        counts: Tensor,
        vocab_size: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        peak = all_reduced(logits.amax(-1).to(dtype), group, dist.ReduceOp.MAX)
        z = logits - peak.unsqueeze(-1)  # in the peak's dtype
        aimed = z.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0) * (1 - smoothing)
        if smoothing > 0:  # 0 times a logit of -inf is not 0
            aimed = aimed + z.sum(-1) * (smoothing / vocab_size)
        total, aimed = all_reduced(torch.stack([z.exp_().sum(-1), aimed]), group)
        # The logits, not their softmax, which is as large: others often keep the logits too.
        ctx.save_for_backward(logits, peak, total, index, here, counts)
        ctx.vocab_size, ctx.smoothing = vocab_size, smoothing
        return (total.log() - aimed).masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():  # once_differentiable would refuse only where ``g`` itself has a gradient
            raise RuntimeError("vocab_parallel_cross_entropy has no second derivative: leave out create_graph=True.")
        logits, peak, total, index, here, counts = ctx.saved_tensors
        g = g.masked_fill(~counts, 0)
        grad = (logits - peak.unsqueeze(-1)).exp_().mul_((g / total).unsqueeze(-1))
        if ctx.smoothing > 0:
            grad -= (g * (ctx.smoothing / ctx.vocab_size)).unsqueeze(-1)
        row = torch.arange(len(index), device=index.device)
        grad[row, index] -= g.masked_fill(~here, 0) * (1 - ctx.smoothing)
        return grad.to(logits.dtype), None, None, None, None, None, None
