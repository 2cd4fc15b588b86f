"""What the code around a module's units computes, in a step on tensors without values, and what autograd keeps of it.

Nothing is recorded for a backward in such a step. So each operation is made once more by itself, on tensors that are
without memory and want a gradient.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel.absent.tensor import AbsentMemory, AbsentTensor
from lightning_parallel.costs.layer_costs import storage_key, with_own_objects
from lightning_parallel.private.torch.tensors import tensors_in, tree_map
from lightning_parallel.tracing.operations import OperationsNoted
from lightning_parallel.tracing.trace import Call


@dataclass
class Around:
    """What the code after a call computes. It is filled in while the step runs.

    Attributes:
        operations: floating-point ones.
        nbytes: of its results.
        kept: those of them that autograd keeps.
        of_results: bytes of the call's results that it keeps.
    """

    operations: int = 0
    nbytes: int = 0
    kept: int = 0
    of_results: int = 0


class CodeAround(OperationsNoted):
    """Counts what the code around the units computes, by the number of calls so far. That before the first call counts
    as if it came after it. What a unit is given isn't counted here: it is an input of the unit.

    Attributes:
        given: the arguments of each call.
        returned: its results' memories, with their bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[Call, tuple[Any, Any]] = {}
        self.returned: dict[Call, dict[AbsentMemory, int]] = {}
        self._inside = False
        self._found = [Around()]
        self._made: dict[AbsentMemory, tuple[Around, int]] = {}  # with what it was made, and bytes
        self._ran: list[tuple[Any, Any, Any, Any]] = []  # operations, with arguments and results

    def found(self) -> list[Around]:
        """For each call what comes after it."""
        saved = {memory for each in self._ran for memory in _saved(*each)}
        for around, nbytes in (self._made[memory] for memory in saved & self._made.keys()):
            around.kept += nbytes
        for around, results in zip(self._found, self.returned.values(), strict=False):
            around.of_results = sum(results[memory] for memory in saved & results.keys())
        return self._found

    def before(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        """A unit is about to be called."""
        self._inside = True
        number = sum(1 for other, _ in self.given if other == name)
        self.given[name, number] = with_own_objects((args, kwargs))
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, AbsentTensor) and tensor.memory in self._made:
                around, nbytes = self._made.pop(tensor.memory)
                around.nbytes = max(0, around.nbytes - nbytes)

    def after(self, unit: nn.Module, args: Any, output: Any) -> None:
        """A unit has been called."""
        self._inside = False
        results = [each for each in tensors_in(output) if isinstance(each, AbsentTensor)]
        self.returned[[*self.given][-1]] = {each.memory: each.nbytes for each in results}
        if len(self.given) > 1:
            self._found.append(Around())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        self.flops = self.nbytes = 0
        output = super().__torch_dispatch__(func, types, args, kwargs)
        here = self._found[-1]
        here.operations += self.flops
        here.nbytes += self.nbytes
        results = [each for each in tensors_in(output) if isinstance(each, AbsentTensor)]
        for result in results if self.nbytes else ():
            self._made[result.memory] = here, result.nbytes
        if results and torch.is_grad_enabled():
            self._ran.append((func, args, kwargs or {}, output))
        return output


def _saved(func: Any, args: Any, kwargs: Any, output: Any) -> set[AbsentMemory]:
    """The memories among an operation's arguments and results that autograd keeps for its backward."""
    of_memory: dict[int, AbsentMemory] = {}
    found: list[int] = []

    def again(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, AbsentTensor):
            if made.is_floating_point():
                made = made.requires_grad_() * 1  # what a leaf isn't: an operation may write to it
            of_memory[storage_key(made)] = value.memory
        kept_alive.append(made)
        return made

    def note(tensor: Tensor) -> Tensor:
        found.append(storage_key(tensor))
        return tensor

    kept_alive: list[Any] = []  # else memory could be given to another one
    with suppress(Exception), torch.enable_grad():  # any: an operation without a backward
        args, kwargs = tree_map(again, (args, kwargs))
        with saved_tensors_hooks(note, lambda tensor: tensor):
            results = func(*args, **kwargs)
        kept_alive.append(results)
        for result, known in zip(tensors_in(results), tensors_in(output), strict=True):
            if isinstance(known, AbsentTensor):
                of_memory.setdefault(storage_key(result), known.memory)
    return {of_memory[each] for each in found if each in of_memory}
