"""The order in which a module's ``forward`` calls its children, read from the source code before anything runs.

Modules are mostly registered in the order in which they are called, but not always: OPT registers its final norm before
its layers, and a residual block its shortcut before what the shortcut is added to. ``a`` counts as
called after ``b`` only if each call of ``a`` comes later than all calls of ``b``, and they share no loop::

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)          # `norm` is called after `layers`

If the code uses a module in another way, or calls other methods of its class, the order may not be visible. Then the
order of registration decides.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import nn

_READ = ("forward", "training_step")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning")


class SourceOrder:
    """The order of one module's children.

    Args:
        module: whose class's ``forward`` and ``training_step`` are read.
    """

    def __init__(self, module: nn.Module) -> None:
        kind, children = type(module), {name for name, _ in module.named_children()}
        methods = [getattr(kind, name, None) for name in _READ]
        own = {name for name in dir(kind) if name not in children and _is_users(getattr(kind, name, None))}
        self._read = [calls for method in methods if callable(method) and (calls := _calls(method, own))]

    def is_after(self, child: str, other: str) -> bool:
        """Is ``child`` called, and plainly always after ``other``?"""
        answers = {_is_after(calls[child], calls.get(other)) for calls in self._read if child in calls}
        return answers == {True} or answers == {True, None}


@dataclass
class _Uses:
    """How one attribute is used.

    Attributes:
        calls: the places, in the order of evaluation, where it (or its items, in a loop) is called, each with the loops
            around it.
        other: it is also used otherwise, or in a function inside the method. Then it may be called anywhere.
    """

    calls: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    other: bool = False


def _is_after(mine: _Uses, theirs: _Uses | None) -> bool | None:
    """None: only one of the two is used."""
    if theirs is None:
        return None
    if mine.other or theirs.other:
        return False
    in_one_loop = any(a & b for _, a in mine.calls for _, b in theirs.calls)
    return not in_one_loop and min(place for place, _ in mine.calls) > max(place for place, _ in theirs.calls)


def _is_users(attribute: Any) -> bool:
    """Is it a method that doesn't come from a library's base class?"""
    return isinstance(attribute, FunctionType) and str(attribute.__module__).partition(".")[0] not in _LIBRARIES


def _calls(method: Callable[..., Any], own: set[str]) -> dict[str, _Uses]:
    """What a method does with the attributes of its first argument; nothing if it calls any of ``own``."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    except (OSError, TypeError, SyntaxError):  # there is no source to read, as of code typed into an interpreter
        return {}
    if not isinstance(function, ast.FunctionDef):
        return {}
    first = [*function.args.posonlyargs, *function.args.args][:1]
    if not first:
        return {}
    reader = _Reader(first[0].arg)
    for statement in function.body:
        reader.visit(statement)
    return {} if reader.called_itself or own & reader.uses.keys() else reader.uses


class _Reader(ast.NodeVisitor):
    """Visits nodes in the order in which they are evaluated.

    Args:
        itself: the name of the method's first argument, "self" as a rule.
    """

    def __init__(self, itself: str) -> None:
        self.uses: dict[str, _Uses] = {}
        self.called_itself = False
        self._itself = itself
        self._place = 0
        self._loops: frozenset[int] = frozenset()
        self._nested = 0  # functions around, which may run later, or never

    def _child(self, node: ast.AST) -> str | None:
        """``x``, of ``self.x`` and of ``self.x[i]``, where i contains no call."""
        while isinstance(node, ast.Subscript) and not any(isinstance(part, ast.Call) for part in ast.walk(node.slice)):
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
        none = isinstance(node.comparators[0], ast.Constant) and isinstance(node.ops[0], ast.Is | ast.IsNot)
        if not (none and self._child(node.left) is not None):  # to ask whether a module is there isn't to use it
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        child = self._child(node.func)
        self.called_itself |= isinstance(node.func, ast.Name) and node.func.id == self._itself
        if child is None:
            self.visit(node.func)
        for part in (*node.args, *node.keywords):
            if isinstance(part, ast.GeneratorExp):  # the function that gets it runs it
                self._comprehension(part)
            else:
                self.visit(part)
        if child is not None:  # it is called after its arguments are computed
            self._used(child, self._loops, plainly=True)

    def _looped_over(self, iterable: ast.AST, target: ast.AST, body: Sequence[ast.AST], loop: int) -> None:
        """``for layer in self.layers: x = layer(x)``, ``in enumerate(self.layers[:n])``."""
        names = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        called = {part.func for statement in body for part in ast.walk(statement) if isinstance(part, ast.Call)}
        calls_it = any(isinstance(function, ast.Name) and function.id in names for function in called)
        wrapped = isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name)
        for part in iterable.args if wrapped and isinstance(iterable, ast.Call) else [iterable]:
            child = self._child(part)
            if child is None:
                self.visit(part)
            else:
                self._used(child, self._loops | {loop}, plainly=calls_it)

    def visit_For(self, node: ast.For) -> None:
        self._looped_over(node.iter, node.target, node.body, id(node))
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
        results: list[ast.AST] = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for generator in node.generators:
            self._looped_over(generator.iter, generator.target, results, id(node))
        self._within(id(node), [*results, *(test for generator in node.generators for test in generator.ifs)])

    visit_ListComp = visit_SetComp = visit_DictComp = _comprehension

    def _function(self, node: ast.AST) -> None:
        self._nested += 1
        self.generic_visit(node)
        self._nested -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_GeneratorExp = _function
