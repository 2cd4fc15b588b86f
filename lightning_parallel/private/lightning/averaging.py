"""What Lightning's callbacks that average weights keep: a copy of the module, and functions that walk over both."""

from __future__ import annotations

from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

Averaging: TypeAlias = WeightAveraging | StochasticWeightAveraging

_OF_STOCHASTIC = ("update_parameters", "transfer_weights", "reset_batch_norm_and_save_state")


def copy_of_module(callback: Averaging) -> nn.Module | None:
    """The copy of the module that holds the averages; None before the callback's ``setup`` has made it."""
    model = callback._average_model
    return model.module if isinstance(model, AveragedModel) else model


def are_known_functions(callback: Averaging) -> bool:
    """Do torch's or Lightning's own functions average? They do it entry by entry."""
    if isinstance(callback, StochasticWeightAveraging):
        return _is_known(callback._avg_fn)
    model = callback._average_model
    return model is None or (_is_known(model.avg_fn) and _is_known(model.multi_avg_fn))


def _is_known(function: Any) -> bool:
    return function is None or function.__module__ in (AveragedModel.__module__, StochasticWeightAveraging.__module__)


def walks(callback: Averaging) -> list[tuple[Any, str]]:
    """The functions, each with its owner, that are given the module and walk over its parameters and the averages side
    by side, or over its BatchNorms."""
    if isinstance(callback, StochasticWeightAveraging):
        return [(callback, name) for name in _OF_STOCHASTIC]
    model = callback._average_model
    return [(callback, "_swap_models"), (callback, "_copy_average_to_current"), (model, "update_parameters")]


def leave_out_schedulers(callback: Averaging, trainer: pl.Trainer) -> None:
    """Do after a state has been loaded what ``StochasticWeightAveraging.on_fit_start`` does, which Lightning calls
    before: the scheduler of that state takes the place of the run's, which would read it, too."""
    if isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
        callback._clear_schedulers(trainer)


def device_of_averages(callback: Averaging, default: torch.device) -> torch.device:
    """Where the callback was asked to keep the averages. Lightning takes the module's device for the default, but asks
    the module before it has been moved."""
    return torch.device(callback._device or default)
