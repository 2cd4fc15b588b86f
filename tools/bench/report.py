"""A measurement's tables in files: as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.tables import Table

# A column of rows that may fail by themselves. The columns before it say what a row measures. Its cells: "ended", or
# "not run", "hung" or "failed" and the reason.
HOW = "how it ended"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Lowest and highest of repeated measurements."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def device_name(device: str) -> str:
    """Of ``cuda`` or ``cpu``, for a title."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def headline(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['backend']}; {versions}; {facts['date']}; "
        f"load average before: {facts['load'][0]}"
    )


def write(directory: Path, name: str, facts: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """``name.md`` and ``name.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = [headline(facts), *(table.markdown() for table in tables)]
    (directory / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    content = dict(facts) | {"tables": [{"title": t.title, "note": t.note, "rows": t.records()} for t in tables]}
    written = directory / f"{name}.json.part"  # whoever reads it while this process is ended finds a whole file
    written.write_text(json.dumps(content, indent=2) + "\n")
    written.replace(directory / f"{name}.json")
