"""All entries of the zoo, by the modules that list them."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util

from tests.zoo.entry import Entry

ROOMS = {  # module: the packages that its entries need
    "tests.zoo.transformers_text": ("transformers",),
    "tests.zoo.transformers_other": ("transformers",),
    "tests.zoo.vision": ("torchvision", "timm"),
    "tests.zoo.diffusion": ("diffusers",),
    "tests.zoo.peft_models": ("transformers", "peft"),
    "tests.zoo.handwritten.order": (),
    "tests.zoo.handwritten.layers": (),
    "tests.zoo.handwritten.steps": (),
}


def entries(pattern: str = "*") -> list[tuple[str, Entry]]:
    """The entries whose name matches a pattern, each with the module that lists it.

    Entries of packages that aren't installed are left out.

    Raises:
        ValueError: two entries have one name.
    """
    found: list[tuple[str, Entry]] = []
    for room, packages in ROOMS.items():
        if all(importlib.util.find_spec(package) is not None for package in packages):
            found += [(room, entry) for entry in importlib.import_module(room).ENTRIES]
    names = [entry.name for _, entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Entries of one name: {', '.join(twice)}.")
    return [(room, entry) for room, entry in found if fnmatch.fnmatchcase(entry.name, pattern)]
