"""The same runs to compare with as for the tests of strategies."""

from __future__ import annotations

from tests.strategies.conftest import single

__all__ = ["single"]
