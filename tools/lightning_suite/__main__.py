"""Runs Lightning's tests under each layout, records what differs from one process, and writes the section of the page.

``make lightning-tests TESTS=/folder/tests_pytorch``: the folder comes from Lightning's repository, at the tag of the
installed version (PyPI's archives don't hold the tests).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.lightning_suite.plugin import LAYOUTS

PARTS = "callbacks trainer/logging_ loops models/test_hooks.py checkpointing tuner"
RECORD = Path(__file__).parent / "recorded.json"
PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
BEGIN, END = "<!-- lightning-tests -->\n", "<!-- /lightning-tests -->"

# A failure's cause in the words of the page: those of the first pattern that its error contains.
CAUSES = (
    ("IsADirectoryError|trainer.pt|NotADirectory", "A checkpoint is a folder, which `torch.load` doesn't open"),
    ("can't be used under|BatchNorm's statistics", "A callback of Lightning's is refused (Callbacks, above)"),
    ("can't save: after an error", "A save after an error is refused where ranks hold parts (Callbacks, above)"),
    ("parameter groups, but", "A checkpoint in parts is not resumed with a callback that adds parameter groups"),
    ("automatic_optimization=False", "Pipelines refuse manual optimization"),
    ("dataloader_iter", "A step that takes `dataloader_iter` is refused"),
    ("backward is overridden", "Pipelines refuse an overridden `backward`"),
    ("returned no loss|has no gradient", "A pipeline can't skip a batch: a step must return a loss with a gradient"),
    (
        "holds no tensor that could be split|can't be joined|never called self",
        "`dp` splits batches, and joins what replicas return",
    ),
    ("sharded already", "A fully sharded module is not trained by a second Trainer, or after an error"),
    ("since its Trainer ran|Tensor and DTensor", "After a run, the test reads or calls what is in parts"),
    ("pickle", "A Trainer that has run can't be pickled, nor can a module in parts"),
    ("Caught Empty", "A stream whose iterator can't be made twice is resumed at the end of an epoch"),
    (
        "has no setter|has no attribute|AssertionError|DID NOT|not been init",
        "The test looks inside, or counts what differs",
    ),
    ("Timeout", "The test took longer than its limit"),
)


Outcomes = dict[str, tuple[bool, bool, str]]  # by test: does a strategy take part, did it pass, and the cause if not


def outcomes(tests: Path, layout: str, jobs: int, only: list[str], file: Path, among: Path | None) -> Outcomes:
    """Run what isn't in ``file`` yet: the tests whose names are in ``among``, a line each, or all."""
    file.touch()
    done = file.with_suffix(".done")
    done.write_text("".join(f"{test}\n" for test in read(file)))
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "pytest.ini").write_text("[pytest]\nxfail_strict = true\n")
        command = [sys.executable, "-m", "pytest", "-c", f"{scratch}/pytest.ini", "--rootdir", str(tests.parent)]
        command += ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "tools.lightning_suite.plugin"]
        command += ["--layout", layout, "--outcomes", str(file), "--without", str(done)]
        if LAYOUTS[layout].ranks > 1:
            command += ["--pairs", str(jobs), "--capture=sys"]  # in memory, of which each rank gets a copy
        else:
            command += [f"--basetemp={scratch}/temp", "-n", str(jobs), "--timeout=120"]
        command += ["--among", str(among)] if among else []
        command += [str(tests / part) for part in only]
        subprocess.run(command, check=False)  # some tests fail
    return read(file)


def read(file: Path) -> Outcomes:
    found: Outcomes = {}
    for test, outcome, takes_part, cause in map(json.loads, file.read_text().splitlines()):
        took, passed, earlier = found.get(test, (False, True, ""))
        failed = outcome == "failed"
        found[test] = (took or takes_part, passed and outcome == "passed", earlier or (cause if failed else ""))
    return found


def that_count(beside: Outcomes) -> list[str]:
    """The tests that make a Trainer for the layout, and pass there."""
    return [test for test, (takes_part, passed, _) in beside.items() if takes_part and passed]


def record(found: dict[str, Outcomes], layouts: list[str], earlier: dict[str, Any]) -> dict[str, Any]:
    """For ``recorded.json``: of each layout, how many tests count, and which of them fail.

    Args:
        earlier: what the file holds. Of the same Lightning, its other layouts are kept.
    """
    this = {"lightning": version("lightning")}
    kept: dict[str, Any] = dict(earlier) if this.items() <= earlier.items() else {}
    for layout in layouts:
        counted = that_count(found[LAYOUTS[layout].beside])
        ends = {test: found[layout].get(test, (True, False, "not run")) for test in counted}
        failed = {test: cause or "skipped" for test, (_, passed, cause) in ends.items() if not passed}
        kept[layout] = {"tests": len(counted), "failed": failed}
    return this | {layout: kept[layout] for layout in LAYOUTS if layout in kept}


def section(kept: dict[str, Any]) -> str:
    """The page's table: for each cause and layout, how many tests fail of it."""
    layouts = {name: each for name, each in kept.items() if name in LAYOUTS}
    rows = {name: Counter(_cause(cause) for cause in each["failed"].values()) for name, each in layouts.items()}
    causes = sorted(set().union(*rows.values()), key=lambda cause: (-sum(row[cause] for row in rows.values()), cause))
    table = [(cause, *(row[cause] or "" for row in rows.values())) for cause in causes]
    table += [("**pass**", *(each["tests"] - len(each["failed"]) for each in layouts.values()))]
    table += [("of", *(each["tests"] for each in layouts.values()))]
    lines = [f"| tests that fail because | {' | '.join(layouts)} |", "|---|" + "--:|" * len(layouts)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in table)]) + "\n"


def _cause(text: str) -> str:
    return next((words for pattern, words in CAUSES if re.search(pattern, text)), "Other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder tests_pytorch")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--only", nargs="+", default=PARTS.split(), help="files and folders in it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/lightning-tests"), help="written as they come")
    parser.add_argument("--resume", action="store_true", help="keep what is in --out, and run the others")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found, among = dict[str, Outcomes](), given.out / "among"
    for layout in dict.fromkeys(["single", *(LAYOUTS[each].beside for each in given.layouts), *given.layouts]):
        file = given.out / f"{layout.replace(' ', '')}.jsonl"
        if not given.resume:
            file.unlink(missing_ok=True)
        beside = found.get(LAYOUTS[layout].beside, {})
        among.write_text("".join(f"{test}\n" for test in that_count(beside)))
        found[layout] = outcomes(given.tests.resolve(), layout, given.jobs, given.only, file, among if beside else None)
    references = {layout.beside for layout in LAYOUTS.values()}
    layouts = [layout for layout in given.layouts if layout not in references]
    kept = record(found, layouts, json.loads(RECORD.read_text()))
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + section(kept) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
