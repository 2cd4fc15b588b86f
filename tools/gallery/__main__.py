"""``python -m tools.gallery`` draws the pages' timelines again; ``python -m tools.gallery async`` one of them."""

from __future__ import annotations

import argparse
import sys

from tools.gallery.captions import unmet
from tools.gallery.pictures import PICTURES, TIMELINES, record, write

_ATTEMPTS = 5  # a process that was kept waiting for a core shows in the picture


def main() -> None:
    """Draw each until it shows what its caption says.

    Raises:
        SystemExit: one never did: the machine is too busy, or a caption isn't true any more.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.gallery", description="Draw the pages' timelines again.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TIMELINES)}; default: all")
    names = parser.parse_args().names or [*TIMELINES]
    for unknown in {*names} - {*TIMELINES}:
        parser.error(f"{unknown} is none of {', '.join(TIMELINES)}")
    for name in names:
        for _ in range(_ATTEMPTS):
            rows = record(name)
            wrong = unmet(name, rows)
            if not wrong:
                break
            print(f"{name}: again, since {'; '.join(wrong)}", flush=True)
        else:
            sys.exit(f"{name}.svg is left as it was: in {_ATTEMPTS} runs it wasn't what its caption says.")
        write(name, rows, PICTURES / f"{name}.svg")
        print(f"Written: {PICTURES / name}.svg", flush=True)


if __name__ == "__main__":
    main()
