"""Pages of which a part is written by a command."""

from __future__ import annotations


def replaced(page: str, begin: str, end: str, made: str) -> str:
    """A page with another text between two marks.

    Raises:
        ValueError: the page doesn't have them.
    """
    head, found, rest = page.partition(begin)
    _, ends, tail = rest.partition(end)
    if not (found and ends):
        raise ValueError(f"The page has no place for it: give one with {begin} and {end}")
    return f"{head}{begin}\n\n{made}\n\n{end}{tail}"
