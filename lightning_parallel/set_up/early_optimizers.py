"""Points an optimizer at this rank's parameters if it was made before the module was divided.

Some modules take an optimizer as an argument, and return it from ``configure_optimizers``. It has the parameters of the
whole module. Where a module has been divided, other parameters have their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class OriginalNames:
    """The names of a whole module's parameters, also after they have been replaced."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        # Others are of a module that has been divided. torch can't move a DTensor that has a weak reference.
        plain = {parameter: name for name, parameter in named if type(parameter) is nn.Parameter}
        self._names = WeakIdKeyDictionary(plain)

    def rebind(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Replace each parameter of the whole module by the one that now has its name.

        Raises:
            ValueError: an optimizer has already stepped a parameter that has been replaced.
        """
        now = dict(module.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [now.get(self._names.get(each, ""), each) for each in group["params"]]
            for parameter in optimizer.state:
                name = self._names.get(parameter, "")
                if name in now and now[name] is not parameter:
                    raise ValueError(
                        f"{type(optimizer).__name__} has already stepped '{name}', which is divided now, so its state "
                        f"doesn't fit. Make it in configure_optimizers. To continue a run, pass ckpt_path."
                    )
