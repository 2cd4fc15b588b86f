"""pina-mathlab: networks that learn the solution of an equation, as in its tutorials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from pina import Trainer
from pina.model import FeedForward, ResidualFeedForward
from pina.problem.zoo import Poisson2DSquareProblem, SupervisedProblem
from pina.solver import (
    PhysicsInformedSingleModelSolver,
    SelfAdaptivePhysicsInformedSolver,
    SupervisedSingleModelSolver,
)

from tools.others.entry import SAMPLES, Entry

# Its Trainer has this, and its modules log with it.
LOGGING = {"sync_dist": True, "on_step": True, "prog_bar": False, "on_epoch": True}
L.Trainer.logging_kwargs = LOGGING  # type: ignore[attr-defined]


def entry(name: str, solver: Callable[[], Any]) -> Entry:
    def train(batch_size: int) -> None:
        Trainer(solver(), batch_size=batch_size, train_size=0.8, val_size=0.2, test_size=0.0, accelerator="cpu",
                logger=False, shuffle=False).train()  # fmt: skip

    return Entry(name, "pina-mathlab", trains=train)


def poisson(kind: Any = PhysicsInformedSingleModelSolver) -> Any:
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(64, "grid", domains="D")
    problem.discretise_domain(64, "random", domains="boundary")
    return kind(problem, FeedForward(2, 1, inner_size=16, n_layers=3))


def supervised(kind: Any) -> Any:
    problem = SupervisedProblem(torch.randn(2 * SAMPLES, 3), torch.randn(2 * SAMPLES, 1))
    return SupervisedSingleModelSolver(problem, kind(3, 1, inner_size=16, n_layers=3), use_lt=False)


ENTRIES = (
    entry("physics-informed", poisson),
    entry("physics-informed, self-adaptive", lambda: poisson(SelfAdaptivePhysicsInformedSolver)),
    entry("supervised", lambda: supervised(FeedForward)),
    entry("supervised, residual", lambda: supervised(ResidualFeedForward)),
)
