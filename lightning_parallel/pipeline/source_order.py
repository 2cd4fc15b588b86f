"""Which of a module's children its ``forward`` calls behind others: read from its source, before anything has run.

Modules are mostly registered in the order in which they are called, and not always: OPT registers its final norm before
its layers, a residual block its shortcut before what it is added to. Only plain calls count, all of them behind, and in
no loop over the others; code that hides its order tells nothing, and registration decides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_READ = ("forward", "training_step")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class SourceOrder:
    """Of one module's children.

    Args:
        module: whose class's ``forward`` and ``training_step`` are read.
    """

    def __init__(self, module: nn.Module) -> None:
        methods = [getattr(type(module), name, None) for name in _READ]
        self._read = [calls for method in methods if callable(method) and (calls := _calls(method))]

    def is_behind(self, child: str, other: str) -> bool:
        """Is ``child`` called, and plainly always behind ``other``?"""
        answers = {_is_behind(calls[child], calls.get(other)) for calls in self._read if child in calls}
        return answers == {True} or answers == {True, None}


@dataclass
class _Uses:
    """Of one attribute.

    Attributes:
        calls: places in the order of evaluation where it is called, or looped over, with the loops around.
        other: is it used otherwise too, or in a function within the method? Then its calls may be anywhere.
    """

    calls: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    other: bool = False


def _is_behind(mine: _Uses, theirs: _Uses | None) -> bool | None:
    """None: only one of both is used."""
    if theirs is None or not (mine.calls and (theirs.calls or theirs.other)):
        return None
    if theirs.other:
        return False
    in_one_loop = any(a & b for _, a in mine.calls for _, b in theirs.calls)
    return not in_one_loop and min(place for place, _ in mine.calls) > max(place for place, _ in theirs.calls)


def _calls(method: Callable[..., Any]) -> dict[str, _Uses]:
    """What a method does with the attributes of its first argument."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source to be read, as of code typed into an interpreter
        return {}
    if not isinstance(function, ast.FunctionDef):
        return {}
    first = [*function.args.posonlyargs, *function.args.args][:1]
    if not first:
        return {}
    reader = _Reader(first[0].arg)
    for statement in function.body:
        reader.visit(statement)
    return reader.uses


class _Reader(ast.NodeVisitor):
    """Visits what is evaluated first first."""

    def __init__(self, itself: str) -> None:
        self.uses: dict[str, _Uses] = {}
        self._itself = itself
        self._place = 0
        self._loops: frozenset[int] = frozenset()
        self._nested = 0  # functions around, which may run later, or never

    def _child(self, node: ast.AST) -> str | None:
        """x, of ``self.x`` and ``self.x[i]``."""
        while isinstance(node, ast.Subscript):
            node = node.value
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._itself
        return node.attr if own and isinstance(node, ast.Attribute) else None

    def _used(self, child: str, loops: frozenset[int], *, plainly: bool) -> None:
        uses = self.uses.setdefault(child, _Uses())
        if plainly and not self._nested:
            self._place += 1
            uses.calls.append((self._place, loops))
        else:
            uses.other = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        child = self._child(node)
        if child is not None:
            self._used(child, self._loops, plainly=False)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        asks_whether_it_is_there = isinstance(node.ops[0], ast.Is | ast.IsNot) and self._child(node.left) is not None
        if not asks_whether_it_is_there:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        child = self._child(node.func)
        if child is None:
            self.visit(node.func)
        for part in (*node.args, *node.keywords):
            self.visit(part)
        if child is not None:  # called when its arguments are there
            self._used(child, self._loops, plainly=True)

    def _looped_over(self, iterable: ast.AST, loop: int) -> None:
        """``for layer in self.layers``, ``in enumerate(self.layers[:n])``: its items are called within."""
        wrapped = isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name)
        for part in iterable.args if wrapped and isinstance(iterable, ast.Call) else [iterable]:
            child = self._child(part)
            if child is None:
                self.visit(part)
            else:
                self._used(child, self._loops | {loop}, plainly=True)

    def visit_For(self, node: ast.For) -> None:
        self._looped_over(node.iter, id(node))
        self._within(id(node), [*node.body])
        for statement in node.orelse:
            self.visit(statement)

    def visit_While(self, node: ast.While) -> None:
        self._within(id(node), [node.test, *node.body])

    def _within(self, loop: int, parts: list[ast.AST]) -> None:
        around, self._loops = self._loops, self._loops | {loop}
        for part in parts:
            self.visit(part)
        self._loops = around

    def visit_Assign(self, node: ast.Assign) -> None:
        for part in (node.value, *node.targets):
            self.visit(part)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._looped_over(generator.iter, id(node))
        results: list[ast.AST] = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._within(id(node), [*results, *(test for generator in node.generators for test in generator.ifs)])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _function(self, node: ast.AST) -> None:
        self._nested += 1
        self.generic_visit(node)
        self._nested -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function
