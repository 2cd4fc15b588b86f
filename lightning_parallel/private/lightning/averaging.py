"""What Lightning's callbacks that average weights keep: a copy of the module, and functions that walk over both."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel


def copy_of_module(callback: WeightAveraging) -> nn.Module | None:
    """The copy of the module that holds the averages; None before the callback's ``setup`` has made it."""
    return None if callback._average_model is None else callback._average_model.module


def are_known_functions(callback: WeightAveraging) -> bool:
    """Do torch's own functions average? They do it entry by entry."""
    model = callback._average_model
    return model is None or (_is_known(model.avg_fn) and _is_known(model.multi_avg_fn))


def _is_known(function: Any) -> bool:
    return function is None or function.__module__ == AveragedModel.__module__


def walks(callback: WeightAveraging) -> list[tuple[Any, str]]:
    """The functions, each with its owner, that are given the module and walk over its parameters and the averages side
    by side."""
    model = callback._average_model
    return [(callback, "_swap_models"), (callback, "_copy_average_to_current"), (model, "update_parameters")]


def device_of_averages(callback: WeightAveraging, default: torch.device) -> torch.device:
    """Where the callback was asked to keep the averages. Lightning takes the module's device for the default, but asks
    the module before it has been moved."""
    return torch.device(callback._device or default)
