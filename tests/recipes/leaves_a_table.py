"""A command for the test of ``make gpu``: leaves a table in the folder that is named last."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.bench import report
from recipes.bench.report import Table

if __name__ == "__main__":
    report.write(Path(sys.argv[1]), "table", report.circumstances(), [Table("One", {"number": "d"}, [[1]], "")])
