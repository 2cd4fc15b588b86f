"""``python -m tests.zoo``: trains the zoo's models under every layout, and compares them with one process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Before torch is imported, here and in the workers: as in tests/conftest.py.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.zoo.torchvision_ops import declare_missing_operators

OPERATORS = declare_missing_operators()  # before Lightning, which imports torchvision

from tests.pool import WorkerPool
from tests.zoo.layouts import LAYOUTS
from tests.zoo.outcome import Outcome
from tests.zoo.page import write
from tests.zoo.record import Results, complaints, record, recorded
from tests.zoo.registry import entries
from tests.zoo.runner import Runner


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="entries whose name matches, as in 'gpt2*'")
    parser.add_argument("--layout", action="append", choices=[layout.name for layout in LAYOUTS], help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("build/zoo.json"), help="results, written as they come")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--wrong", action="store_true", help="with --resume: run again what was wrong")
    parser.add_argument("--page", type=Path, help="write the table here, from all that is in --out")
    parser.add_argument("--record", action="store_true", help="keep the outcomes, if none is worse than recorded")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of what isn't a refusal")
    options = parser.parse_args()
    layouts = [layout for layout in LAYOUTS if options.layout is None or layout.name in options.layout]
    results = Results.read(options.out) if options.resume and options.out.exists() else Results()
    pool = WorkerPool(preload=["tests.zoo.preloaded"])
    try:
        runner = Runner(pool)
        for room, entry in entries(options.only):
            for layout in layouts:
                if layout.name in results.verdicts.get(entry.name, {}):
                    kept = results.verdicts[entry.name][layout.name]
                    if not (options.wrong and kept is not None and kept.outcome.is_wrong):
                        continue
                begin = time.monotonic()
                verdict = runner.run(room, entry, layout)
                seconds = time.monotonic() - begin
                results.add(entry.name, layout.name, verdict, seconds)
                results.write(options.out)
                if verdict is None:
                    continue
                said = verdict.detail.splitlines()[0] if verdict.detail else ""
                size = "" if verdict.deviation is None else f"{verdict.deviation:.1e}"
                print(
                    f"{seconds:5.1f} s  {entry.name:40} {layout.name:16} {verdict.outcome:20} {size:8} {said}", flush=True
                )
                if options.traces and verdict.outcome.is_wrong and verdict.trace:
                    print(verdict.trace, flush=True)
    finally:
        pool.shutdown()
    outcomes = [verdict.outcome for cases in results.verdicts.values() for verdict in cases.values() if verdict]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome))
    if options.page is not None:
        write(results, options.page)
    worse = complaints(results, recorded())
    print("\n".join(["Worse than recorded:", *worse]) if worse else "Nothing is worse than recorded.")
    if options.record and not worse:
        record(results)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
