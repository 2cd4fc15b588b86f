"""Rows of a test's table that repeat what other rows show, on more ranks or with another model."""

from __future__ import annotations

from typing import Any

import pytest


def thorough(*rows: Any) -> list[Any]:
    """These rows, marked for ``make thorough``: ``make test`` leaves them out, so that it takes minutes. The other rows
    of a table have each layout, each feature and each kind of model once, at least."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.thorough) for row in rows]
