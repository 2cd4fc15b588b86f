"""What the tests of recipes share: each file of a config is parsed once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf


@pytest.fixture(autouse=True, scope="session")
def _parsed_once() -> Iterator[None]:
    """Hydra parses two dozen files for each config, a fifth of the time of composing it. A file is known by its text,
    so one that a test has changed is parsed again."""
    load, known = OmegaConf.load, dict[str, Any]()

    def once(file: Any) -> Any:
        if not hasattr(file, "read"):  # a path
            return load(file)
        text = file.read()
        if text not in known:
            file.seek(0)
            known[text] = load(file)
        return copy.deepcopy(known[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(once))
        yield
