"""A case of the kill matrix (`make torture`), from its beginning to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.cases import SMALL_SAMPLE, cases
from tests.torture.runner import Runner


@pytest.mark.parametrize("name", SMALL_SAMPLE)
def test_a_run_goes_on_after_it(tmp_path: Path, name: str) -> None:
    (case,) = cases(name)
    verdict = Runner(tmp_path).run(case)
    assert verdict.held, verdict.problems
