"""Example data: LightningDataModules that need no download.

``DATA`` maps the ``name`` of a config under conf/data to where the class is. It holds names, not classes, so
that reading it costs no import of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DATA: Mapping[str, str] = MappingProxyType(
    {
        "stdlib": "recipes.data.stdlib.StdlibData",
        "text": "recipes.data.text.TextData",
        "digits": "recipes.data.digits.DigitsData",
        "hf": "recipes.data.hf.HFData",
        "images": "recipes.data.images.ImageData",
    }
)
