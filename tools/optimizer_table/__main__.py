"""``python -m tools.optimizer_table``: trains optimizers under every layout, and compares them with one process."""

from __future__ import annotations

import fnmatch
import sys
from functools import partial

import tools.workers.environment  # noqa: F401  before torch
from tools.optimizer_table import page
from tools.optimizer_table.training import ENTRIES, FOUND, expected, make_runner
from tools.workers.pool import WorkerPool
from tools.zoo.program import Cases, arguments


def main() -> int:
    options = arguments("tools.optimizer_table", __doc__, FOUND.values(), "build/optimizers.json").parse_args()
    cases, surprises = Cases(options, FOUND.values(), options.out), 0
    runner = make_runner(WorkerPool())
    try:
        for kind in fnmatch.filter(ENTRIES, options.only):
            for layout in cases.left(kind):
                verdict = cases.run(kind, layout.name, partial(runner.run, "", ENTRIES[kind], layout))
                assert verdict is not None, "no layout has more stages than the model has layers"
                if verdict.outcome is not expected(kind, layout.name):
                    surprises += 1
                    print(f"It isn't {expected(kind, layout.name)}.\n{verdict.trace}", flush=True)
    finally:
        runner.pool.shutdown()
    if options.page is not None:
        page.write(cases.results, options.page)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
