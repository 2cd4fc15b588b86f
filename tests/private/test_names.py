"""Each private name of torch and of Lightning is used. Those that no other test would miss are in test_torch.py and
test_lightning.py."""

from __future__ import annotations

import ast

import pytest

from tests.test_house import ROOT, is_private, modules


def named_by(node: ast.stmt) -> list[str]:
    """The public names that a line of a module gives."""
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Subscript):  # which is a type's alias
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.ImportFrom):
        names = [alias.name for alias in node.names if alias.asname == alias.name]
    return [name for name in names if not is_private(name)]


@pytest.mark.parametrize("room", ["torch", "lightning"])
def test_every_name_is_used(room: str) -> None:
    folder = ROOT / "lightning_parallel" / "private" / room
    others = [
        file.read_text() for file in modules(ROOT / "lightning_parallel", ROOT / "recipes") if file.parent != folder
    ]
    given = [name for file in modules(folder) for node in ast.parse(file.read_text()).body for name in named_by(node)]
    assert [name for name in given if not any(name in text for text in others)] == []
