"""A hook for a module that has been divided: what would take memory for the whole model is done for this rank's part.

A module with a method ``configure_part`` is asked when its layers are divided, before they are moved to the device and
the optimizer is made::

    class MyModule(L.LightningModule):
        def setup(self, stage):
            if not getattr(self.trainer.strategy, "configures_part", False):
                self.configure_part()  # under strategies where every rank holds the whole

        def configure_part(self):
            self.float()  # weights that have been mapped from files in bfloat16
"""

from __future__ import annotations

from torch import nn


def configure_part(module: nn.Module) -> None:
    """Call the module's hook, if it has one."""
    hook = getattr(module, "configure_part", None)
    if callable(hook):
        hook()
