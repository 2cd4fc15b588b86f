"""``python -m tools.optimizer_table``: trains optimizers under every layout, and compares them with one process."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from pathlib import Path

import tools.workers.environment  # noqa: F401  before torch
from tools.optimizer_table import page
from tools.optimizer_table.training import ENTRIES, FOUND, expected, make_runner
from tools.workers.pool import WorkerPool
from tools.zoo.record import Results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.optimizer_table", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="optimizers whose name matches")
    parser.add_argument("--out", type=Path, default=Path("build/optimizers.json"), help="results, as they come")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--page", type=Path, help="write the page, from all that is in --out")
    options = parser.parse_args()
    results, surprises = Results.read(options.out) if options.resume else Results(), 0
    pool = WorkerPool()
    runner = make_runner(pool)
    try:
        for kind in fnmatch.filter(ENTRIES, options.only):
            left = [layout for layout in FOUND.values() if layout.name not in results.verdicts.get(kind, {})]
            for layout in left:
                begin = time.monotonic()
                verdict = runner.run("", ENTRIES[kind], layout)
                assert verdict is not None, "no layout has more stages than the model has layers"
                results.add(kind, layout.name, verdict, time.monotonic() - begin)
                results.write(options.out)
                print(f"{kind:12} {layout.name:22} {verdict.outcome:10} {verdict.detail[:160]}", flush=True)
                if verdict.outcome is not expected(kind, layout.name):
                    surprises += 1
                    print(f"It isn't {expected(kind, layout.name)}.\n{verdict.trace}", flush=True)
    finally:
        pool.shutdown()
    if options.page is not None:
        page.write(results, options.page)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
