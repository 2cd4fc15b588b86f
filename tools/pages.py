"""Writes pages of generated evidence, or the generated part of a page."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path

from tools import NOT_SEARCHED

SHOWN = 160  # characters of a message


def write(parts: Iterable[str], file: Path) -> None:
    """Write a page of generated evidence; empty parts are left out."""
    file.write_text("\n\n".join([NOT_SEARCHED, *filter(None, parts)]) + "\n")


def about(*packages: str) -> dict[str, str]:
    """Where and with what a program runs: torch, Lightning, and those of these packages that are installed."""
    versions = {}
    for package in ("torch", "lightning", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), gloo",
        "python": platform.python_version(),
        **versions,
    }


def made(here: Mapping[str, str], seconds: float) -> str:
    """A sentence of what :func:`about` returns, without its full stop."""
    versions = ", ".join(f"{name} {here[name]}" for name in ("python", "torch", "lightning"))
    return f"Made on {here['date']}, on {here['machine']}, all cases {seconds / 60:.0f} minutes; {versions}"


def line(message: str, shown: int = SHOWN) -> str:
    """The first line of a message, shortened, without what changes from run to run, safe in Markdown."""
    line = message.strip().splitlines()[0] if message.strip() else ""
    line = re.sub(r"0x[0-9a-f]+|\b\d+\.\d+\.\d+\.\d+:\d+\b", "...", line)
    line = line if len(line) <= shown else line[:shown].rsplit(" ", 1)[0] + " ..."
    return re.sub(r"([\\*_<>\[\]|`])", r"\\\1", line)


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
