"""Packages that import ``pytorch_lightning`` get ``lightning.pytorch`` where asked for, or a warning names them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import lightning.pytorch
import pytest
from lightning.pytorch import callbacks

import lightning_parallel as lp
from recipes import work
from tests.recipes.runs import problems

ALIAS = "lightning_parallel.as_pytorch_lightning"


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in [name for name in sys.modules if name.startswith(("pytorch_lightning", ALIAS))]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.startswith(("pytorch_lightning", ALIAS))]:
        del sys.modules[name]  # then what was there comes back


def by_hand() -> None:
    importlib.import_module(ALIAS)


def by_a_config() -> None:
    assert problems("as_pytorch_lightning=true") == []


def in_a_worker() -> None:
    with pytest.raises(KeyError, match="seed"):  # what the config has next
        work.run({"as_pytorch_lightning": True})


@pytest.mark.parametrize("install", [by_hand, by_a_config, in_a_worker])
def test_both_names_are_one_package(install: Callable[[], None]) -> None:
    own_spec = callbacks.__spec__
    install()
    other = importlib.import_module("pytorch_lightning")
    assert other is lightning.pytorch
    assert importlib.import_module("pytorch_lightning.callbacks") is callbacks
    assert callbacks.__spec__ is own_spec
    assert importlib.util.find_spec("pytorch_lightning.nothing") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pytorch_lightning.nothing")


def test_what_is_imported_already_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(ImportError, match=f"pytorch_lightning is imported already.*import {ALIAS}"):
        importlib.import_module(ALIAS)


def test_modules_of_the_other_package_are_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        __module__ = "pytorch_lightning.core.module"

    class Inner(Theirs):
        __module__ = "pytorch_lightning.demos"

    package = ModuleType("pytorch_lightning")
    package.LightningModule = Theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lp.PipelineStrategy()

    class Forecaster(Theirs):
        __module__ = "a_package"

    with pytest.warns(match=f"a_package.*Forecaster is a LightningModule of pytorch_lightning.*import {ALIAS}"):
        lp.DataParallelStrategy()


class Base:
    __module__ = "pytorch_lightning.core.module"


class Model(Base): ...


def test_a_config_is_told_of_the_setting() -> None:
    found = problems("model=custom", f"model._target_={__name__}.Model")
    assert any("use as_pytorch_lightning=true" in str(problem) for problem in found), found
