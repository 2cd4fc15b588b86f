"""Gives optimizers that were made before the module was divided this rank's parameters.

Some modules take an optimizer as an argument, and return it from ``configure_optimizers``. It has the parameters that
the module had then; where these have been divided, others stand in their place, under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class ParametersBefore:
    """The names of a whole module's parameters, by which they are known when they have been replaced."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._names = WeakIdKeyDictionary({parameter: name for name, parameter in named})

    def replace(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Put the parameters that the divided module has in the place of those before.

        Raises:
            ValueError: an optimizer has made steps with those before.
        """
        now = dict(module.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now.get(self._names.get(each, ""), each) for each in group["params"]]
            for parameter in optimizer.state:
                name = self._names.get(parameter, "")
                if name in now and now[name] is not parameter:
                    raise ValueError(
                        f"{type(optimizer).__name__} has made steps before the module was divided. Make it in "
                        f"configure_optimizers, and resume a run by ckpt_path."
                    )
