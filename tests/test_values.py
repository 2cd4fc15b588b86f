"""values.py: what is said of values in errors."""

from __future__ import annotations

from lightning_parallel.values import line_outside


def test_the_line_that_runs_is_named() -> None:
    assert line_outside(()).startswith("values.py:")
    assert line_outside(("lightning_parallel",)).startswith("test_values.py:")


def test_a_thread_of_libraries_alone_has_no_line() -> None:
    class Everything:
        def __contains__(self, package: object) -> bool:
            return True

    assert line_outside(Everything()) == "Something"
