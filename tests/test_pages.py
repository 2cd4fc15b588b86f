"""README.md, docs/ and the like: every command runs, every snippet is valid, and every link leads somewhere."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import lightning_parallel
from lightning_parallel.settings import settings_of
from lightning_parallel.strategies.pipeline import PipelineOptions
from lightning_parallel.strategies.pipeline_async import AsyncPipelineOptions
from lightning_parallel.strategies.tensor import TensorParallelOptions
from recipes import ROOT, record
from recipes.compose import check, jobs
from tests.recipes import runs, tiny
from tests.recipes.runs import composed
from tests.recipes.test_configs import assert_valid
from tests.tensor.helpers import ranks
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

README, KOREAN = ROOT / "README.md", ROOT / "README.ko.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, KOREAN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
SMALL = ["trainer.max_steps=2", "trainer.limit_val_batches=1"]
SMALL_GPT = ["model.layers=4", "model.width=16", "model.heads=2", "data.batch_size=12", "data.context=16"]
CHECKPOINT = "step-300.ckpt"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(*pages: Path) -> list[str]:
    """The lines of shell blocks, without comments, each once."""
    lines = (line for page in pages for block in blocks(page, "sh") for line in block.splitlines())
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


COMMANDS = commands(*PAGES)
SCRIPT = r"(python|torchrun --nproc-per-node=\d) \w+\.py\b"  # one that the page prints
TRAIN = "python -m recipes.train"
TRAININGS = [shlex.split(command.removeprefix(TRAIN)) for command in COMMANDS if command.startswith(TRAIN)]
INSTALLED = [command for command in COMMANDS if command.startswith("lp-")]  # tests/recipes/test_own_configs.py
OTHER_MODULES = [command for command in COMMANDS if command.startswith("python -m") and not command.startswith(TRAIN)]
# Of a cluster that isn't here: their configs are checked. tests/clusters runs some.
ELSEWHERE = [words for words in TRAININGS if any(re.match("cluster=(?!local)", word) for word in words)]
ELSEWHERE += [line.partition("-m recipes.train ")[2].split() for line in COMMANDS if line.startswith("torchrun ")]
TOURS = {name: commands(ROOT / "docs" / f"{name}.md") for name in ("pretrained", "images")}
ON_TOURS = [shlex.split(line.removeprefix(TRAIN)) for lines in TOURS.values() for line in lines]
HERE = [words for words in TRAININGS if words not in [*ELSEWHERE, *ON_TOURS]]
# A worker sees nothing new in what these say; experiments, ways to debug, trackers and some strategies are in
# tests/recipes.
SEEN = "strategy=(single|tensor_parallel)$|-m|hparams_search|experiment|debug|hydra|launch|cluster.max_restarts|"
SEEN += "trainer.max_steps|logger=(mlflow|wandb)|cluster.devices=4|strategy=pipeline_(async|tensor)$|callbacks=ema"
REPEATED = [words for words in HERE if any(re.match(SEEN, word) for word in words)]
SELDOM = [words for words in REPEATED if words[0] in ("-m", "logger=wandb") or "callbacks=ema" in words]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_command_is_of_a_kind_that_is_run_here() -> None:
    known = {*(f"{TRAIN} {shlex.join(words)}" for words in TRAININGS), *INSTALLED, *OTHER_MODULES}
    known |= {line for line in COMMANDS if line.startswith("make ") and line.split()[1] in TARGETS}
    known |= {"pip install .", "pip install '.[recipes]'", "pip install 'jsonargparse[signatures]'"}
    known |= {line for line in COMMANDS if re.match(SCRIPT, line)}  # test_scripts.py
    known |= {line for line in COMMANDS if re.match("torchrun .* -m recipes.train cluster=torchrun", line)}
    assert set(COMMANDS) <= known and len(TRAININGS) > 8


# -- recipes.train -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two stages, as the commands that go on from one expect it."""
    return trained(pool, tmp_path_factory.mktemp("run"), ["strategy=pipeline_1f1b"]) / "checkpoints" / "last.ckpt"


def trained(pool: WorkerPool, folder: Path, overrides: list[str]) -> Path:
    """Run a recipe in a small form, in the pool's processes; the folder of the run."""
    gpt = composed(*overrides)["model"].get("name") == "gpt"
    words = [*SMALL, *(SMALL_GPT if gpt else []), *overrides]
    return runs.trained(pool, folder / "run", *words)


@pytest.mark.parametrize("words", ELSEWHERE, ids=" ".join)
def test_trainings_elsewhere_are_right(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert check([*words, "launch=false"]) == []


def test_trainings_that_repeat_others_are_right() -> None:
    for words in REPEATED:
        if any(re.match("-m|hydra|hparams_search", word) for word in words):
            assert check([word for word in words if word != "-m"], multirun="-m" in words) == [], words
        else:
            assert runs.problems(*words) == [], words


@pytest.mark.parametrize("words", [*(w for w in HERE if w not in REPEATED), *thorough(*SELDOM)], ids=" ".join)
def test_trainings_run(
    pool: WorkerPool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    text = tmp_path / "my.txt"
    text.write_text((ROOT / "README.md").read_text() * 3)
    given = {"data.path=my.txt": f"data.path={text}"}
    given |= {f"{key}={CHECKPOINT}": f"{key}={checkpoint}" for key in ("ckpt_path", "init_from")}
    given["strategy=auto"] = "strategy=fully_sharded"  # tests/recipes/test_commands.py plans
    words = [given.get(word, word) for word in words]
    if "logger=wandb" in words:
        words.append("logger.wandb.offline=true")
    if f"ckpt_path={checkpoint}" in words:
        words.append("trainer.max_steps=4")  # it has made the first two
    parsed = OverridesParser.create().parse_overrides([word for word in words if word != "-m"])
    for number, job in enumerate(jobs(parsed)):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        output = trained(pool, folder, job)
        assert record.read_metrics(output)["val_loss"] is not None
        if (output / "csv").exists():  # runs are compared by the whole config
            assert "cluster" in yaml.safe_load((output / "csv" / "hparams.yaml").read_text())
        if "timeline=true" in words:
            assert (output / "timeline.png").exists() and (output / "timeline.json").exists()


@pytest.mark.parametrize("name", TOURS)
def test_a_tour_leads_from_a_folder_to_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command goes on from what those before it have left; tests/recipes runs such commands."""
    monkeypatch.chdir(tmp_path)
    tiny.model(tmp_path / "my-model", longest=512)
    tiny.chats(tmp_path / "chats.jsonl"), tiny.texts(tmp_path / "texts.jsonl"), tiny.images(tmp_path / "photos")
    trained = set()
    for _, _, module, first, *words in map(shlex.split, TOURS[name]):
        if module == "recipes.train":
            assert_valid(check([first, *words]), timm=name == "images")
            trained |= {word.removeprefix("hydra.run.dir=") for word in words}
            continue
        assert first in trained
        if module == "recipes.export":
            made = tmp_path / words[0]
            made.mkdir()
            (made / "model.safetensors").touch(), (made / "config.json").write_text('{"architecture": "a"}')


def test_the_quickstart_shows_the_problems_that_are_told() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    count, text = re.findall(r"^    (\d+) problems in the config.*\n((?: {6}.*\n)+)", page, re.MULTILINE)[0]
    shown = [line.strip().removesuffix("...") for line in text.splitlines()]
    given = [line.partition(": ")[0] for line in shown if not line.startswith("strategy.stages=auto")]
    told = [str(problem) for problem in check(given)]
    assert len(told) == len(shown) == int(count)
    for problem, line in zip(told, shown, strict=True):
        if not line.startswith("cluster.devices"):  # it depends on the machine
            assert problem.startswith(line)


# -- other programs ------------------------------------------------------------------------------------------


class Parsed(Exception):
    """The arguments are right. What the program does then is tested in a small form with its module."""


@pytest.mark.parametrize("command", OTHER_MODULES)
def test_arguments_of_other_programs_are_right(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(parse: Any) -> Any:
        def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            parse(self, args, namespace)
            raise Parsed

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
    _, _, module, *arguments = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    package = ROOT / module.replace(".", "/")
    with pytest.raises(Parsed):
        runpy.run_module(f"{module}.__main__" if package.is_dir() else module, run_name="__main__")


# -- snippets ------------------------------------------------------------------------------------------------

SNIPPETS = [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))]


class AnyModule(L.LightningModule):
    """It takes the weights of any model."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.strict_loading = False


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=lambda value: getattr(value, "name", None))
def test_snippets_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Path, number: int
) -> None:
    """Up to ``fit``, which test the strategies."""
    (tmp_path / CHECKPOINT).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    fitted: list[Any] = []
    monkeypatch.setattr(L.Trainer, "fit", lambda trainer, *args, **kwargs: fitted.append((args, kwargs)))
    given = {name: getattr(lightning_parallel, name) for name in lightning_parallel.__all__}
    monkeypatch.setattr(L.Trainer, "test", L.Trainer.fit)
    given |= {"L": L, "torch": torch, "MyExistingModule": AnyModule, "datamodule": L.LightningDataModule()}
    given |= {"group": ranks(1), "x": torch.ones(2, 512), "dataset": torch.utils.data.TensorDataset(torch.ones(64))}
    source = blocks(page, "python")[number]
    exec(compile(source, name_of(page), "exec"), given)
    assert bool(fitted) == ("trainer.fit" in source or "trainer.test" in source)
    if "read_full" in source:
        assert all(isinstance(value, torch.Tensor) for value in given["state_dict"].values())


def shown_settings(page: Path, strategy: str) -> dict[str, Any]:
    """The arguments in the longest call of a strategy on a page."""
    calls = [
        node
        for block in blocks(page, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == strategy
    ]
    call = max(calls, key=lambda node: len(node.keywords))
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def test_pages_show_every_setting_with_its_default() -> None:
    def defaults(options: type) -> dict[str, Any]:
        return {field.name: field.default for field, _ in settings_of(options)}

    module, plans = ROOT / "docs" / "your-module.md", ROOT / "docs" / "tensor-plans.md"
    pipeline, late = defaults(PipelineOptions), defaults(AsyncPipelineOptions)
    assert shown_settings(module, "PipelineStrategy") == pipeline
    own = {name: value for name, value in late.items() if name not in pipeline}
    assert shown_settings(module, "AsyncPipelineStrategy") == own | {"microbatches": late["microbatches"]}
    assert shown_settings(plans, "TensorParallelStrategy") == defaults(TensorParallelOptions)


# -- links, and the Korean page ------------------------------------------------------------------------------


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not link.startswith("http")]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if page in DOCS:
            assert (ROOT / "docs") in target.parents, f"{link} leads out of the site"
        assert not anchor or anchor in anchors(target), link


def test_every_page_of_the_site_is_reached() -> None:
    reached = {(page.parent / link.partition("#")[0]).resolve() for page in DOCS for link in links(page)}
    assert {*DOCS} - {ROOT / "docs" / "index.md"} <= reached


def test_the_first_pages_say_whether_anything_has_run_on_a_gpu() -> None:
    """`make gpu` writes what it has seen."""
    seen = (ROOT / "docs" / "gpu.json").exists()
    for page in (README, ROOT / "docs" / "index.md", ROOT / "docs" / "gpu.md"):
        assert ("Nothing here has run on a GPU yet" in page.read_text()) != seen, page


def test_the_korean_readme_says_the_same() -> None:
    assert commands(KOREAN) == commands(README)
    assert [link for link in links(KOREAN) if link != "README.md"] == [
        link for link in links(README) if link != "README.ko.md"
    ]
    first = re.compile(r"^\| (`\w+`) \|", re.MULTILINE)
    assert first.findall(KOREAN.read_text()) == first.findall(README.read_text())
    numbers = re.compile(r"\d+(?:[.,]\d+)*")
    assert Counter(numbers.findall(KOREAN.read_text())) == Counter(numbers.findall(README.read_text()))
    code = [[ast.dump(ast.parse(block)) for block in blocks(page, "python")] for page in (README, KOREAN)]
    assert code[0] == code[1]
