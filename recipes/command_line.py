"""What the commands beside ``recipes.train`` do alike."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recipes.launchers.launcher import WorkersFailed
from recipes.problem import ConfigError
from recipes.processes import INTERRUPTED


@contextmanager
def errors_in_a_word() -> Iterator[None]:
    """Around a command: it logs to the terminal, and what is wrong ends it with a message instead of a traceback."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    try:
        yield
    except (ConfigError, WorkersFailed, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
