"""A command for the tests of ``make gpu``. It leaves a table with one row in a folder. Arguments: the folder; how the
row ended; then perhaps "stay", to wait beside a process of its own, or a file of results, to print what is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recipes.tables import Table, circumstances
from tools.bench import report

if __name__ == "__main__":
    folder, how, *then = sys.argv[1:]
    table = Table("One", {"number": "d", report.HOW: ""}, [[1, how]], "")
    report.write(Path(folder), "table", circumstances(), [table])
    if then == ["stay"]:
        print("process", subprocess.Popen(["sleep", "600"]).pid)
        sys.stdin.close()
        os.wait()
    elif then:
        print(json.dumps(json.loads(Path(then[0]).read_text())["commands"]))
    else:
        print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')}")
