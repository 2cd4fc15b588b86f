"""All entries of the zoo, by the modules that list them."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util

from tools.zoo.entry import Entry

ROOMS = {  # module: the packages that its entries need
    "tools.zoo.transformers_text": ("transformers",),
    "tools.zoo.transformers_other": ("transformers",),
    "tools.zoo.vision": ("torchvision", "timm"),
    "tools.zoo.diffusion": ("diffusers",),
    "tools.zoo.peft_models": ("transformers", "peft"),
    "tools.zoo.handwritten.order": (),
    "tools.zoo.handwritten.layers": (),
    "tools.zoo.handwritten.steps": (),
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
