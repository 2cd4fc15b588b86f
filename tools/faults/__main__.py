"""``python -m tools.faults``: seeds faults one at a time, and sees whether ``check`` finds and places them."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

import tools.workers.environment  # noqa: F401  before torch
from tools.faults import page
from tools.faults.faults import FAULTS
from tools.faults.training import PAIRS, Case, case, case_of
from tools.workers.pool import WorkerPool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose name matches")
    parser.add_argument("--page", type=Path, help="write the page, if all are run")
    options = parser.parse_args()
    pool = WorkerPool()

    def shown(each: Case) -> Case:
        print(f"{'' if each.is_right else 'WRONG: '}{each.name or 'no fault'}: {each.model}, {each.layout}", flush=True)
        print(each.report, flush=True)
        return each

    try:
        names = fnmatch.filter(FAULTS, options.only)
        faulty = [shown(case_of(pool, name)) for name in names]
        pairs = PAIRS if len(names) == len(FAULTS) else []
        clean = [shown(case(pool, *pair)) for pair in pairs]
    finally:
        pool.shutdown()
    if options.page is not None and pairs:
        page.write(faulty, clean, options.page)
    return 0 if all(each.is_right for each in (*faulty, *clean)) else 1


if __name__ == "__main__":
    sys.exit(main())
