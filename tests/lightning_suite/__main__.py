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

from tests.lightning_suite.plugin import LAYOUTS

PARTS = "callbacks trainer/logging_ loops models/test_hooks.py checkpointing tuner"
RECORD = Path(__file__).parent / "recorded.json"
PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
BEGIN, END = "<!-- lightning-tests -->\n", "<!-- /lightning-tests -->"

# A failure's cause in the words of the page: those of the first pattern that its error contains.
CAUSES = (
    ("IsADirectoryError|trainer.pt|NotADirectory", "A checkpoint is a folder, which `torch.load` doesn't open"),
    ("can't be used under", "A callback of Lightning's is refused (Callbacks, above)"),
    ("automatic_optimization=False", "Pipelines refuse manual optimization"),
    ("dataloader_iter", "Pipelines refuse `training_step(dataloader_iter)`"),
    ("backward is overridden", "Pipelines refuse an overridden `backward`"),
    ("returned no loss|has no gradient", "A pipeline can't skip a batch: a step must return a loss with a gradient"),
    ("Can't pickle|cannot pickle", "A Trainer that has run can't be pickled"),
    ("has no setter|object has no attribute|^assert|AssertionError", "The test looks inside, or counts what differs"),
    ("Timeout", "The test took longer than its limit"),
)


def outcomes(folder: Path, layout: str, jobs: int, only: list[str]) -> dict[str, tuple[bool, bool, str]]:
    """By test: whether a strategy takes part, whether it passed, and the cause if it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "pytest.ini").write_text("[pytest]\nxfail_strict = true\n")
        file = Path(scratch) / "outcomes"
        file.touch()
        command = [sys.executable, "-m", "pytest", "-c", f"{scratch}/pytest.ini", "--rootdir", str(folder.parent), "-q"]
        command += ["-p", "tests.lightning_suite.plugin", "--layout", layout, "--outcomes", str(file), "--tb=no"]
        command += ["-p", "no:cacheprovider", "--timeout=120", f"--basetemp={scratch}/temp", "-n", str(jobs)]
        subprocess.run([*command, *(str(folder / part) for part in only)], check=False)  # some tests fail
        found: dict[str, tuple[bool, bool, str]] = {}
        for test, outcome, takes_part, cause in map(json.loads, file.read_text().splitlines()):
            took, passed, earlier = found.get(test, (False, True, ""))
            failed = outcome == "failed"
            found[test] = (took or takes_part, passed and outcome == "passed", earlier or (cause if failed else ""))
    return found


def record(found: dict[str, dict[str, tuple[bool, bool, str]]]) -> dict[str, Any]:
    """For ``recorded.json``: how many tests make a Trainer and pass in one process, and which of them fail here."""
    counted = [test for test, (takes_part, passed, _) in found["single"].items() if takes_part and passed]
    kept = {"lightning": version("lightning"), "tests": len(counted), "layouts": {}}
    for layout in [layout for layout in found if layout != "single"]:
        ends = {test: found[layout].get(test, (True, False, "not run")) for test in counted}
        kept["layouts"][layout] = {test: cause or "skipped" for test, (_, passed, cause) in ends.items() if not passed}
    return kept


def section(kept: dict[str, Any]) -> str:
    """The page's table: for each cause and layout, how many tests fail of it."""
    layouts = kept["layouts"]
    rows = {name: Counter(_cause(cause) for cause in failed.values()) for name, failed in layouts.items()}
    causes = sorted(set().union(*rows.values()), key=lambda cause: -sum(row[cause] for row in rows.values()))
    lines = [f"| of {kept['tests']} tests, fail because | {' | '.join(layouts)} |", "|---|" + "--:|" * len(layouts)]
    lines += [f"| {cause} | {' | '.join(str(row[cause] or '') for row in rows.values())} |" for cause in causes]
    lines += [f"| **pass** | {' | '.join(str(kept['tests'] - len(failed)) for failed in layouts.values())} |"]
    return "\n".join(lines) + "\n"


def _cause(text: str) -> str:
    return next((words for pattern, words in CAUSES if re.search(pattern, text)), "Other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", type=Path, help="the folder tests_pytorch")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--only", nargs="+", default=PARTS.split(), help="files and folders in it")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    layouts = dict.fromkeys(["single", *given.layouts])
    kept = record({layout: outcomes(given.tests.resolve(), layout, given.jobs, given.only) for layout in layouts})
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + section(kept) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
