"""recipes/launchers/cause.py: of the errors that ranks have left in a folder, the one that was first is told."""

from __future__ import annotations

import os
from pathlib import Path

from recipes import record
from recipes.launchers.launcher import first_failure

LOST = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nx.PeerLostError: The link broke.\n'
OWN = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
ValueError: no luck
  on two lines
"""


def test_the_first_error_that_is_a_rank_s_own(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    for rank, text in enumerate([LOST, LOST, OWN, OWN.replace("no", "other")]):
        record.write_error(tmp_path, rank, text)
        os.utime(tmp_path / record.ERRORS / f"rank-{rank}.txt", (rank, rank))
    found = first_failure(tmp_path)
    assert found is not None and (found.rank, found.message) == (2, "ValueError: no luck\n  on two lines")
    assert found.traceback == OWN


def test_lost_connections_alone_are_no_cause(tmp_path: Path) -> None:
    record.write_error(tmp_path, 0, LOST)
    assert first_failure(tmp_path) is None
