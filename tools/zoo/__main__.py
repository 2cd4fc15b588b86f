"""``python -m tools.zoo``: trains the zoo's models under every layout, and compares them with one process."""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import tools.workers.environment  # before torch
import tools.zoo.preloaded  # noqa: F401  before Lightning: it lets torchvision be imported
from tools.pages import about
from tools.workers.pool import WorkerPool
from tools.zoo import page
from tools.zoo.layouts import LAYOUTS
from tools.zoo.program import Cases, arguments, counted
from tools.zoo.record import PACKAGES, complaints, record, recorded
from tools.zoo.registry import entries
from tools.zoo.runner import Runner, UselessEntryError


def main() -> int:
    parser = arguments("tools.zoo", __doc__, LAYOUTS, "build/zoo.json")
    parser.add_argument("--record", action="store_true", help="keep the outcomes, if none is worse than recorded")
    options = parser.parse_args()
    cases = Cases(options, LAYOUTS, options.out)
    useless = _run(cases)
    results = cases.results
    print(counted(results))
    if options.page is not None:
        page.write(results, about(*PACKAGES), {entry.name: entry.source for _, entry in entries()}, options.page)
    worse = complaints(results, recorded())
    print("\n".join(["Worse than recorded:", *worse]) if worse else "Nothing is worse than recorded.")
    if options.record and not worse:
        record(results)
    return 1 if worse or useless else 0


def _run(cases: Cases) -> list[str]:
    """Run what isn't in the results yet; the entries that were of no use."""
    useless = []
    runner = Runner(WorkerPool(preload=["tools.zoo.preloaded"]))
    try:
        for room, entry in entries(cases.options.only):
            try:
                for layout in cases.left(entry.name):
                    cases.run(entry.name, layout.name, partial(runner.run, room, entry, layout))
            except UselessEntryError as error:
                print(error, flush=True)
                useless.append(entry.name)
    finally:
        runner.pool.shutdown()
    return useless


if __name__ == "__main__":
    sys.exit(main())
