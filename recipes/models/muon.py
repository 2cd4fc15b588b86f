"""Muon for the matrices of hidden layers, AdamW for all else, in one optimizer object (Jordan et al. 2024).

Muon makes all singular values of an update equal, so the update depends on the whole matrix. It is made for
hidden layers; embeddings, the output, biases and norms train better with AdamW. Lightning's trainers and the pipelines
want exactly one optimizer, torch has two: here they share one list of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override


class MuonAdamW(Optimizer):
    """``torch.optim.Muon`` for the groups with ``muon=True``, ``torch.optim.AdamW`` for the others.

    A group's other options are those of the torch optimizer that steps it. Muon's rate is adjusted so that its updates
    are as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"): one rate and one weight decay do for
    both.

    Args:
        params: parameters or groups of them, as for every torch optimizer; without the key ``muon`` they are AdamW's.
        lr: learning rate.
        betas: AdamW's decay rates of the two moments.
        weight_decay: decoupled.
        momentum: Muon's (Nesterov's).

    Raises:
        ValueError: an option is out of range, or a group with ``muon=True`` has a parameter that isn't a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        defaults = {"muon": False, "lr": lr, "betas": betas, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = self.defaults
        nothing: list[dict[str, Any]] = [{"params": []}]
        muon = bool(param_group.get("muon", given["muon"]))
        both = {"lr": given["lr"], "weight_decay": given["weight_decay"]}
        stepper: Optimizer
        if muon:
            stepper = torch.optim.Muon(nothing, **both, momentum=given["momentum"], adjust_lr_fn="match_rms_adamw")
        else:
            stepper = torch.optim.AdamW(nothing, **both, betas=given["betas"])
        super().add_param_group({**stepper.defaults, **param_group, "muon": muon})
        other = next((each for each in self.param_groups[-1]["params"] if muon and each.ndim != 2), None)
        if other is not None:
            self.param_groups.pop()
            raise ValueError(
                f"muon=True for a parameter of shape {tuple(other.shape)}: Muon is for matrices. Put it into a group "
                f"with muon=False."
            )

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Groups and state are this object's. Optimizers that kept them would miss a checkpoint that is loaded, a group
        # that is added, or a pickling, which all give it new ones.
        for kind, muon in ((torch.optim.Muon, True), (torch.optim.AdamW, False)):
            stepper = kind([{"params": []}])
            stepper.state = self.state
            stepper.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            stepper.step()
        return loss
