"""A hook for a module that has been divided."""

from __future__ import annotations

from torch import nn


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
