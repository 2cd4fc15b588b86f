"""Makes a module refuse calls after its Trainer has ended: it is then only a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle


class PartOfModel:
    """Refuses calls of modules that work only while a Trainer runs."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Refuse calls of these modules from now on. Called when a Trainer has ended."""
        self.end()
        self._hooks = [module.register_forward_pre_hook(_refuse) for module in modules]

    def end(self) -> None:
        """Allow calls again. Called when a Trainer begins."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def refuse_copies(module: nn.Module) -> None:
    """Refuse ``copy.deepcopy(module)``, ``pickle`` and ``torch.save`` of a module that is fully sharded, from now
    on."""

    def refuse(protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{type(module).__name__} can't be copied or pickled: it is fully sharded, and each rank holds a part of "
            f"each parameter. Save it with trainer.save_checkpoint(path) on all ranks; "
            f"lightning_parallel.checkpoint.read_full(path) reads it whole."
        )

    module.__reduce_ex__ = refuse  # type: ignore[method-assign, assignment]  # copy and pickle look at the object


def _refuse(module: nn.Module, args: Any) -> NoReturn:  # of this module: a module with hooks can be pickled
    raise RuntimeError(
        f"{type(module).__name__} can't be called: since its Trainer ran, each rank holds a part of the parameters. "
        f"Call trainer.predict(module, ...), or load a checkpoint into a new module in one process "
        f"(lightning_parallel.checkpoint.read_full gives its state_dict)."
    )
