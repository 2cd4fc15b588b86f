"""Refuses ``parameter.data = ...`` for a fully sharded parameter: it would change nothing.

The parameter is a DTensor, which computes with a tensor of its own, this rank's part, whatever its ``.data`` is set
to. Neither its version nor an address tells of it, so the assignment itself has to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class AssignmentsRefused(TorchFunctionMode):
    """Inside, an assignment to the ``.data`` of a divided parameter of the module raises a ValueError."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _SET_DATA and isinstance(args[0], DTensor):
            names = {id(parameter): name for name, parameter in self._module.named_parameters()}
            raise ValueError(
                f"A step assigns to '{names.get(id(args[0]))}.data', which is fully sharded: the assignment would be "
                f"lost. Change it in place, by `.data.copy_(...)` or `.data.lerp_(...)`."
            )
        return function(*args, **(kwargs or {}))
