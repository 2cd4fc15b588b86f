"""pina: its solvers, on Poisson's equation and on given values."""

from __future__ import annotations

from typing import Any

from pina import Condition, Trainer
from pina.model import FeedForward
from pina.problem import BaseProblem
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import PhysicsInformedSingleModelSolver, SupervisedSingleModelSolver

from tests.others.data import normal
from tests.others.entry import SAMPLES, Entry


def physics() -> Any:
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(SAMPLES, "random", domains="D")
    problem.discretise_domain(SAMPLES, "random", domains="boundary")
    model = FeedForward(len(problem.input_variables), len(problem.output_variables), inner_size=16, n_layers=2)
    return PhysicsInformedSingleModelSolver(problem, model)


def supervised() -> Any:
    class Table(BaseProblem):
        output_variables = ["u"]
        input_variables = ["x", "y"]
        conditions = {"data": Condition(input=normal(2), target=normal(1))}

    return SupervisedSingleModelSolver(Table(), FeedForward(2, 1, inner_size=16, n_layers=2), use_lt=False)


def entry(name: str, solver: Any) -> Entry:
    def train(batch_size: int) -> None:
        Trainer(solver(), batch_size=batch_size, shuffle=False, accelerator="cpu", max_epochs=1).train()

    return Entry(name, "pina-mathlab", trains=train, validates=False)


ENTRIES = (entry("physics-informed", physics), entry("supervised", supervised))
