"""A module that is only a part of the model: a hook of its own when it is divided, and no calls when its Trainer has
ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_parallel.private.lightning.launching import say_device


def configure_part(module: nn.Module) -> None:
    """Call the module's method ``configure_part``, if it has one: what would take memory for the whole model is done
    there for this rank's part.

    Pipelines, tensor parallelism and fully sharded replicas call it once for a module, when it is divided, before the
    optimizer is made. Other strategies, and a single process, don't; there the module calls it itself::

        class MyModule(L.LightningModule):
            def setup(self, stage):
                if stage == "fit" and not getattr(self.trainer.strategy, "calls_configure_part", False):
                    self.configure_part()

            def configure_part(self):
                self.float()  # weights that have been mapped from files in bfloat16

    Args:
        module: the module whose layers have been divided.
    """
    hook = getattr(module, "configure_part", None)
    if callable(hook):
        hook()


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Inside, parameters are replaced. The new ones get what the user has set on the old ones of the same names, by
    which ``configure_optimizers`` may tell them apart (``weight._no_weight_decay = True``)."""
    attributes = {name: {**vars(p)} for name, p in module.named_parameters(remove_duplicate=False)}
    yield
    for name, parameter in module.named_parameters(remove_duplicate=False):
        vars(parameter).update({**attributes.get(name, {}), **vars(parameter)})


def move_others(module: pl.LightningModule, device: torch.device) -> None:
    """Move to a device what has no parameters, such as metrics, where the parameters of the module are there already.
    torch can't move a DTensor that has a weak reference, not even to where it is."""
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)
    say_device(module, device)


def refuse_calls(modules: Iterable[nn.Module], until: ExitStack) -> None:
    """Refuse calls of modules that work only while a Trainer runs, until the stack is closed."""
    for module in modules:
        until.callback(module.register_forward_pre_hook(_refuse).remove)


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
