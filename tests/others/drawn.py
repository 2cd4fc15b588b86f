"""``python -m tests.others.drawn``: writes docs/drawn.md from drawn.json, what became of modules drawn at random.

The modules themselves are other people's, and aren't kept here. Each became an entry of its own, as those in rooms/.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.others.page import HEAD, NAMES
from tests.zoo.outcome import Outcome
from tests.zoo.page import MARKS

RECORD = Path(__file__).parent / "drawn.json"
PAGE = Path(__file__).parents[2] / "docs" / "drawn.md"


def page(record: dict[str, Any]) -> str:
    """The page: how the modules were drawn, how many ran, and each module with its outcomes or why it didn't run."""
    files = record["files"]
    ran = [file for file in files if file["modules"]]
    modules = [module for file in ran for module in file["modules"]]
    counts = {name: Counter(module["outcomes"].get(name) for module in modules) for name in NAMES}
    summary = [HEAD, "|---|" + "--:|" * len(NAMES)]
    summary += [f"| {o} | {' | '.join(str(counts[name][o.value]) for name in NAMES)} |" for o in Outcome]
    rows = [HEAD, "|---|" + ":-:|" * len(NAMES)]
    for module in modules:
        marks = (MARKS[Outcome(o)] if (o := module["outcomes"].get(name)) else "" for name in NAMES)
        rows.append(f"| {module['class']} | {' | '.join(marks)} |")
    reasons = Counter(file["why"] for file in files if not file["modules"])
    skipped = [f"- {reason}: {count}" for reason, count in reasons.most_common()]
    changed = [f"- {module['class']}: {module['why']}" for module in modules if module["why"]]
    texts = (
        _INTRODUCTION.format(files=len(files), ran=len(ran), modules=len(modules), **record["draw"]),
        "\n".join(summary),
        "## What went wrong\n\n" + "\n".join(f"- {said}" for said in record["wrong"]),
        "## Modules\n\n`=` equal, `n` different by nature, `r` refused.\n\n" + "\n".join(rows),
        "## Stand-ins\n\nWhat isn't there was replaced by something small, or left out:\n\n" + "\n".join(changed),
        "## Files that were not run\n\n" + "\n".join(skipped),
    )
    return "\n\n".join(texts) + "\n"


_INTRODUCTION = """\
# Modules drawn at random

{files} files that define a LightningModule were drawn at random from public repositories, and each was tried as it is.
{ran} of them could be trained in one process from the file alone, with {modules} modules, which were trained under
every layout and compared with one process. [Other people's modules](others.md) says how, and what the words mean.

How they were drawn: the last letter of a class's name and one of three usual base classes give {possible} search
strings, such as `{example}`. `random.Random({seed}).sample` chose {queries} of them; `r(pl.LightningModule):` was
added. A search of public source code gave up to ten files for each. `random.Random({seed}).shuffle` put the files in
order, and every third one was left out. The search names no repositories, so only classes are named here. Run on {date}
with torch {torch}."""


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RECORD.read_text())))
