"""The order of the package: who may import whom, and who may read whose private names."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from functools import cache
from pathlib import Path

import lightning_parallel
from recipes import ROOT

PACKAGE = Path(lightning_parallel.__file__).parent
# Arrows run from a row to the rows after it, and within a row.
ROWS = (
    {"planning"},
    {"costs"},
    {"comparison"},
    {"strategies"},
    {"steps", "late"},
    {"set_up"},
    {"checks"},
    {"pipeline", "tensor_plans", "callbacks", "fully_sharded", "local_replicas", "loading"},
    {"cuts", "results", "tensor"},
    {"optimizers"},
    {"checkpoint", "tracing", "losses", "timeline", "schedules"},
    {"absent", "messages", "gradients"},
    {"backward", "ranks"},
    {"batch", "batch_joins", "disk_offload", "interception", "seeding", "settings", "tensor_lists", "values"},
    {"batch_objects", "as_pytorch_lightning"},
    {"private"},
)
KNOW_NO_LIGHTNING = (
    "pipeline", "cuts", "tracing", "absent", "schedules", "messages", "backward", "losses", "timeline", "tensor",
    "tensor_plans", "fully_sharded", "local_replicas",
)  # fmt: skip
INSTALLED = (PACKAGE, ROOT / "hydra_plugins", ROOT / "recipes")
PRIVATE = {*(PACKAGE / "private").rglob("*.py")}
OWN = {"self", "cls", "other", "ctx"}  # other: an object of the same class


def modules(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> tuple[tuple[str, str | None], ...]:
    """Module and name of every import."""
    nodes = [*ast.walk(tree_of(file))]
    whole = [(alias.name, None) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [(node.module, node.names) for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return (*whole, *((module, alias.name) for module, names in parts for alias in names))


def is_private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.endswith("__")


def row_of(part: str) -> int:
    return next(number for number, row in enumerate(ROWS) if part in row)


def test_every_room_has_its_row() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__", "__pycache__"} == set().union(*ROWS)


def test_arrows_run_one_way() -> None:
    for file in modules(PACKAGE):
        inside = file.relative_to(PACKAGE)
        room = inside.parts[0].removesuffix(".py")
        for module, name in imports(file) if room != "__init__" else ():
            words = [*module.split("."), *([name] if name else [])]
            if words[0] == "lightning_parallel":
                assert row_of(words[1]) >= row_of(room), f"{inside} imports {module}"
            if words[0].startswith("lightning"):
                assert words[0] == "lightning_parallel" or room not in KNOW_NO_LIGHTNING, f"{inside} imports {module}"


def test_what_is_installed_knows_no_tools_and_tools_know_no_tests() -> None:
    for file in modules(*INSTALLED, ROOT / "tools"):
        later = {"tests"} | (set() if file.is_relative_to(ROOT / "tools") else {"tools"})
        later |= {"recipes"} if file.is_relative_to(PACKAGE) else set()
        assert not {module.split(".")[0] for module, _ in imports(file)} & later, file


def test_recipes_have_no_import_circle() -> None:
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in modules(ROOT / "recipes")}
    arrows = {
        name: {each for module, of in imports(file) for each in (module, f"{module}.{of}")} & names.keys()
        for name, file in names.items()
    }
    graphlib.TopologicalSorter(arrows).prepare()  # a circle is an error, which names it


def test_private_names_of_torch_and_lightning_stand_in_one_module_each() -> None:
    for file in {*modules(PACKAGE, ROOT / "recipes")} - PRIVATE:
        tree = tree_of(file)
        for module, name in imports(file):
            if module.split(".")[0] in ("torch", "lightning", "torchmetrics"):
                preloaded = module == "torch._dynamo" and name is None  # for its memory, no name of it is used
                assert preloaded or not any(map(is_private, [*module.split("."), name])), f"{file}: {module}.{name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and file.is_relative_to(PACKAGE):
                own = isinstance(node.value, ast.Name) and node.value.id in OWN
                inherited = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
                # Members of a class of the same module, and public methods of named tuples.
                assert own or inherited or node.attr in ("_make", "_replace") or defines(tree, node.attr), (
                    f"{file}, line {node.lineno}: {ast.unparse(node)}"
                )


def defines(tree: ast.AST, attribute: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
        for node in ast.walk(tree)
    ) or any(isinstance(node, ast.FunctionDef) and node.name == attribute for node in ast.walk(tree))


def test_every_private_name_of_torch_and_lightning_is_used() -> None:
    """Those that no other test would miss are in tests/private."""
    name_given = r"^(?:def |class |from .* import )?([A-Za-z]\w+)(?: as \1$| = (?!Callable)|\(|\[|:$)"
    for room in (PACKAGE / "private" / "torch", PACKAGE / "private" / "lightning"):
        others = "".join(file.read_text() for file in modules(PACKAGE, ROOT / "recipes") if file.parent != room)
        given = re.findall(name_given, "".join(file.read_text() for file in modules(room)), re.MULTILINE)
        assert [name for name in given if name not in others] == []


def test_no_class_has_more_than_two_bases_of_ours() -> None:
    for name in (".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in modules(PACKAGE)):
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and kind.__module__ == name:
                ours = [base.__name__ for base in kind.__mro__[1:] if base.__module__.startswith("lightning_parallel")]
                assert len(ours) <= 2, f"{kind.__name__}: {ours}"
