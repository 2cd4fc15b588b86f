"""In which order a module's code uses its children: read from its source, before anything has run.

Modules are mostly registered in the order in which they are called, and not always: OPT registers its final norm before
its layers, BART the norm of its embeddings behind them. The methods around them tell. Only what all of them agree on
counts, so that a guess is wrong for code only that hides its order; then the first step is refused as ever.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType

from torch import nn

_LIBRARIES = ("torch", "lightning", "pytorch_lightning")  # whose base classes know nothing of a model's children


class SourceOrder:
    """Of one module's children.

    Args:
        module: whose class's methods are read, but for ``__init__``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._uses = [uses for method in _methods(type(module)) if (uses := _uses(method))]

    def is_behind(self, child: str, other: str) -> bool | None:
        """Is every use of ``child`` behind every use of ``other``, in each method that uses both? False: every one is
        before. None: neither, or no method uses both."""
        found = set()
        for uses in self._uses:
            if child in uses and other in uses:
                behind, before = min(uses[child]) > max(uses[other]), max(uses[child]) < min(uses[other])
                found.add(behind if behind or before else None)
        return found.pop() if len(found) == 1 else None


def _methods(kind: type) -> Iterator[Callable[..., object]]:
    """Those that are in force, of the user's own classes."""
    seen = {"__init__"}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            return
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name not in seen:
                yield method
            seen.add(name)


def _uses(method: Callable[..., object]) -> dict[str, list[int]]:
    """By attribute of the method's first argument, at which places in the order of evaluation it is used."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):  # no source to be read, as of code typed into an interpreter
        return {}
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return {}
    evaluation = _Evaluation(function.args.args[0].arg)
    for statement in function.body:
        evaluation.visit(statement)
    return evaluation.uses


class _Evaluation(ast.NodeVisitor):
    """Visits what is evaluated first first: the arguments of a call before what is called."""

    def __init__(self, itself: str) -> None:
        self.uses: dict[str, list[int]] = {}
        self._itself = itself
        self._place = 0

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == self._itself:
            self._place += 1
            self.uses.setdefault(node.attr, []).append(self._place)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for part in (*node.args, *node.keywords, node.func):
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for part in (*node.generators, node.elt):
            self.visit(part)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = _comprehension
