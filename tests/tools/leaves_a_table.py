"""A command for the tests of ``make gpu``. It leaves a table with one row in a folder. Arguments: the folder; how the
row ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recipes.tables import Table, circumstances
from tools.bench import report

if __name__ == "__main__":
    folder, how = sys.argv[1:]
    table = Table("One", {"number": "d", report.HOW: ""}, [[1, how]], "")
    report.write(Path(folder), "table", circumstances(), [table])
    print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')}")
