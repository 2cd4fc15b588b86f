"""All entries, by the modules that list them."""

from __future__ import annotations

import importlib
import importlib.util

from tools.others.entry import Entry

ROOMS = {  # module in rooms/: what its entries import
    "forecasting": ("pytorch_forecasting",),
    "lightly": ("lightly",),
    "geometric": ("torch_geometric",),
    "segmentation": ("segmentation_models_pytorch",),
    "molecules": ("chemprop",),
    "neuralforecast": ("neuralforecast",),
    "darts": ("darts",),
    "gluonts": ("gluonts",),
    "scvi": ("scvi",),
    "deeptab": ("deeptab",),
    "uq_box": ("lightning_uq_box",),
    "torch_uncertainty": ("torch_uncertainty",),
    "torchgeo": ("torchgeo",),
    "lifestream": ("ptls",),
    "anomalib": ("anomalib",),
    "cellarium": ("cellarium",),
    "rl4co": ("rl4co",),
    "collective_variables": ("mlcolvar",),
    "terratorch": ("terratorch",),
    "materials": ("matgl",),
    "atoms": ("schnetpack",),
    "recommending": ("replay",),
    "equations": ("pina",),
}


def is_installed(room: str) -> bool:
    """Whether the packages that a room's entries import are there."""
    return all(importlib.util.find_spec(package) is not None for package in ROOMS[room])


def module_of(room: str) -> str:
    return f"tools.others.rooms.{room}"


def entries(room: str) -> tuple[Entry, ...]:
    """A room's entries.

    Raises:
        ValueError: two of them have one name.
    """
    found: tuple[Entry, ...] = importlib.import_module(module_of(room)).ENTRIES
    names = [entry.name for entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Entries of one name: {', '.join(twice)}.")
    return found
