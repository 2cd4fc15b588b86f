"""What a rank holds of a model, to compare it with one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.absent.tensor import AbsentTensor


def here(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that are on this rank. A tied one has both names, so that stages agree on what a name means."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if not isinstance(p, AbsentTensor)}


def complete(tensor: Tensor) -> Tensor:
    """A copy; of a DTensor, whose ranks all call, the whole tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: complete(p.detach()) for name, p in here(module).items()}
