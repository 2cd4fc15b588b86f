"""placeholder"""
from __future__ import annotations
from pathlib import Path
from tests.zoo.record import Results
def write(results: Results, file: Path) -> None: ...
