"""Lets ``import torchvision`` succeed where its compiled operators don't load.

A torchvision built for CUDA can't load its operators beside a torch for the CPU. Then its import fails, since it
registers fake versions of operators that nobody has declared, and with it fails the import of torchmetrics and of
Lightning, which import torchvision where it is installed. Only detection models call these operators. So it is enough
to declare them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch


def declare_missing_operators() -> torch.library.Library | None:
    """Declare torchvision's operators if they don't load. To be called before anything imports torchvision.

    Returns:
        The declarations, which hold as long as this object lives; None if there was nothing to do.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        for file in folder.glob("_C*.so"):
            torch.ops.load_library(str(file))
        return None
    except OSError:
        pass
    text = (folder / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(set(re.findall(r'register_(?:meta\("|fake\("torchvision::)(\w+)"', text))):
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


OPERATORS = declare_missing_operators()  # with the first import of this module, which keeps them
