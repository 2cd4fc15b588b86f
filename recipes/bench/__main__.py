"""``python -m recipes.bench pipeline``: measures the pipelines beside torch's own and beside loops by hand."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from recipes.bench import compute, memory, overhead, report, sleeping
from recipes.bench.report import Table

# What each word of --only measures: in full, and with --quick.
PIPELINE: dict[str, tuple[Callable[[], list[Table]], Callable[[], list[Table]]]] = {
    "sleeping": (partial(sleeping.measure, sleeping.Sizes()), partial(sleeping.measure, sleeping.QUICK)),
    "compute": (partial(compute.measure, compute.Sizes()), partial(compute.measure, compute.QUICK)),
    "overhead": (partial(overhead.measure, overhead.Sizes()), partial(overhead.measure, overhead.QUICK)),
    "memory": (partial(memory.measure, memory.Sizes()), partial(memory.measure, memory.QUICK)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.only if name not in PIPELINE]
    if unknown:
        raise SystemExit(f"--only={','.join(options.only)}: no {unknown[0]!r}; choose among {', '.join(PIPELINE)}")
    facts = report.circumstances()
    print(report.headline(facts), flush=True)
    begin = time.monotonic()
    tables: list[Table] = []
    for name in options.only:
        full, quick = PIPELINE[name]
        for table in (quick if options.quick else full)():
            tables.append(table)
            print(f"\n{table.text()}", flush=True)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if options.output is not None:
        report.write(options.output, "pipeline", facts, tables)
        print(f"Written: {options.output / 'pipeline.md'} and pipeline.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.bench",
        description="Measure the strategies beside what they are measured against, in the same run.",
        epilog="Figures of different runs can be compared only on an idle machine.",
    )
    parser.add_argument("what", choices=["pipeline"])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=list(PIPELINE),
        metavar="PART,...",
        help=f"some of: {', '.join(PIPELINE)} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, in less than a minute: to see that it runs")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write pipeline.md and pipeline.json there")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C: the workers are ended first
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
