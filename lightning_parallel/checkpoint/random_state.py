"""The states of a process's global random generators (torch's, Python's, NumPy's) as tensors, and back."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

RANDOM_STATE = "random_state"  # in a checkpoint that was read: this rank's


def random_state() -> dict[str, Tensor]:
    """The states of the global generators, by name."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(legacy["state"]["pos"]),
    }
    # Both draw normal numbers in pairs, and keep the second one for the next call.
    if gauss is not None:
        state["python_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    if legacy["has_gauss"]:
        state["numpy_gauss"] = torch.tensor(legacy["gauss"], dtype=torch.float64)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Set the global generators to what :func:`random_state` returned. What the state lacks stays as it is."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, *words = state["python"].tolist()
        gauss = float(state["python_gauss"]) if "python_gauss" in state else None
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        key = state["numpy"].numpy().astype(np.uint32)
        kept = float(state["numpy_gauss"]) if "numpy_gauss" in state else 0.0
        np.random.set_state(("MT19937", key, int(state["numpy_position"]), int("numpy_gauss" in state), kept))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
