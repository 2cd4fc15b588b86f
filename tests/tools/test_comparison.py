"""tools/comparison.py: a comparison's table becomes a picture."""

from __future__ import annotations

from pathlib import Path

from recipes.compare import report
from recipes.compare.rows import rows
from tests.recipes.test_compare import outcomes
from tools.comparison import main, read


def test_a_table_becomes_a_picture(tmp_path: Path) -> None:
    table = rows(outcomes())
    report.write(tmp_path, ("", ""), table, [])
    found = read(tmp_path / "compare.csv")
    assert [(row.strategy, row.error) for row in found] == [(row.strategy, row.error) for row in table]
    assert (found[2].step, found[2].peaks, found[2].held) == (table[2].step, table[2].peaks, table[2].held)
    main([str(tmp_path / "compare.csv"), str(tmp_path / "bars.png")])
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
