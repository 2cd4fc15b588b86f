"""A command for the test of ``make gpu``: leaves a table in the folder that is named last."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.tables import Table, circumstances
from tools.bench import report

if __name__ == "__main__":
    report.write(Path(sys.argv[1]), "table", circumstances(), [Table("One", {"number": "d"}, [[1]], "")])
