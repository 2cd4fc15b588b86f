"""One process of a run: ``python -m recipes.worker RESOLVED_YAML``, started by recipes.train or torchrun.

``work.py`` imports torch, which takes seconds. This file doesn't, so that a worker ends together with its launcher, and
at Ctrl-C without a word, from its first moment on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from recipes.processes import INTERRUPTED, LAUNCHED, ON_GPUS, REFUSED, import_from_here


def end_with_the_launcher() -> None:
    """Ask the kernel to kill this process when its launcher dies, however that dies (Linux)."""
    if LAUNCHED in os.environ and sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHED]):  # it died while this process was starting
            os.kill(os.getpid(), signal.SIGKILL)


def _end_quietly(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def start(config: str) -> None:
    """Do a worker's work, by the text of the resolved config."""
    end_with_the_launcher()
    os.environ.update(ON_GPUS | os.environ)
    interrupt = signal.getsignal(signal.SIGINT)
    if callable(interrupt):  # it isn't ignored
        signal.signal(signal.SIGINT, _end_quietly)
    from recipes.work import main

    signal.signal(signal.SIGINT, interrupt)
    try:
        main(config)
    except (Exception, KeyboardInterrupt) as error:
        if LAUNCHED in os.environ:  # the launcher prints the first error, once
            sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        if type(error).__name__ == "PeerLostError":  # the cause is another rank's; the rest is in the run's folder
            sys.exit(f"rank {os.environ.get('RANK', 0)}: {error}")
        if _is_refusal(error):
            traceback.print_exc()
            sys.exit(REFUSED)
        raise


def _is_refusal(error: BaseException) -> bool:
    from recipes.launchers.launcher import Failure

    message = "".join(traceback.format_exception_only(error)).strip()
    return Failure(0, message, "".join(traceback.format_exception(error))).is_refusal


def _text(file: Path) -> str:
    """The config's. torchrun starts processes again without telling all of them: they hear of it with the config."""
    if LAUNCHED in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        return file.read_text()
    from recipes import handover

    return handover.shared(file)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m recipes.worker RESOLVED_YAML (recipes.train writes it)")
    import_from_here()
    start(_text(Path(sys.argv[1])))
