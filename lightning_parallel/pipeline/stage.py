"""What runs on this rank: the user's own step, cut at the stage's first and last layer.

The step (``training_step``, any callable) runs on every stage, from its first line. The layers of earlier stages
answer with absent tensors (``absent.py``) and cost nothing, but for the one just before the cut: it answers with what
arrived from the stage before, in the structure that it returns itself. So the code between the layers (unpacking
tuples, masks, residual scaling) runs as written, on live values. The stage's last layer doesn't return: what it
computed is the stage's output, and the user's step is left there. On the last stage it goes on to the loss.

        stage 0                stage 1                stage 2
        embed, layer 0, 1      layer 2, 3             layer 4, 5, head, loss

        embed(x)               absent                 absent
        layer 0                absent                 absent
        layer 1  --> leaves    what arrived           absent
                               layer 2                absent
                               layer 3  --> leaves    what arrived
                                                      layer 4
                                                      layer 5
                                                      head, loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_parallel.pipeline.absent import AbsentForward, AbsentTensor, first_absent, make_absent
from lightning_parallel.pipeline.partition import Partition


class _LeaveStep(BaseException):
    """Raised by the hook behind the stage's last layer. A BaseException, so that ``except Exception`` in the user's
    code lets it pass."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Arrival:
    """What arrived from the stage before, and, after the backward, the gradients to send back.

    Args:
        tensors: the values.
        requires_grad: for each, whether the sender wants a gradient.
    """

    def __init__(self, tensors: list[Tensor], requires_grad: list[bool]) -> None:
        self._tensors = tensors
        self._wanted = requires_grad
        self._zeros = [torch.empty_like(t, device="meta") for t, w in zip(tensors, requires_grad, strict=True) if w]
        self._gradients: list[Tensor] | None = None

    def receive(self) -> list[Tensor]:
        """The tensors as autograd sees them, once: results of an operation whose backward collects the gradients.
        Not leaves, so that a layer may work on them in place (``nn.ReLU(inplace=True)``)."""
        tensors, self._tensors = self._tensors, []  # keeping them would tie a reference cycle through autograd
        if not (any(self._wanted) and torch.is_grad_enabled()):
            return tensors
        anchor = torch.empty((), requires_grad=True)
        live = iter(_Receive.apply(anchor, self, [t for t, w in zip(tensors, self._wanted, strict=True) if w]))  # type: ignore[no-untyped-call]
        return [next(live) if w else t for t, w in zip(tensors, self._wanted, strict=True)]

    def collect(self, gradients: tuple[Tensor, ...]) -> None:
        self._gradients = list(gradients)

    def gradients(self, device: torch.device) -> list[Tensor]:
        """One for each tensor that requires one; zeros where the loss doesn't depend on it."""
        if self._gradients is None:
            return [torch.zeros_like(t, device=device) for t in self._zeros]
        return self._gradients


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrival: Arrival, tensors: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.arrival = arrival
        return tuple(t.data for t in tensors)  # `.data`: no view of a message buffer, so it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.arrival.collect(gradients)
        return None, None, None


@dataclass
class Departure:
    """What the stage's last layer returned: its tensors, in order, to be sent on."""

    tensors: list[Tensor]


class Stage:
    """One stage of a partitioned module: makes the rest absent, and runs steps cut at its bounds.

    Args:
        module: the whole module. Its other stages' parameters and buffers are made absent here.
        partition: who owns what.
        index: the stage to be.
        device: where absent tensors claim to be.
    """

    def __init__(self, module: nn.Module, partition: Partition, index: int, device: torch.device) -> None:
        self.module = module
        self.partition = partition
        self.index = index
        self._layers = [module.get_submodule(name) for name in partition.layers]
        self._owned = partition.layers_of(index)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._patched: list[nn.Module] = []
        self._running = False
        self._next = 0  # index of the layer that the step has to call next
        self._arrival: Arrival | None = None
        self._drop_absent(device)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.partition.stages - 1

    def describe(self) -> str:
        names = self.partition.layers
        first, last = names[self._owned.start], names[self._owned.stop - 1]
        outside = [name for name, stage in self.partition.outside.items() if stage == self.index]
        return f"stage {self.index}: {first}" + (f" to {last}" if last != first else "") + (
            f", with {', '.join(outside)}" if outside else ""
        )

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters held here, under their original (first) names: tied names once."""
        return {
            self.partition.aliases[name]: parameter
            for name, parameter in self.module.named_parameters()
            if not isinstance(parameter, AbsentTensor)
        }

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers held here that belong into a checkpoint."""
        persistent = self.module.state_dict(keep_vars=True)
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name in persistent and not isinstance(buffer, AbsentTensor)
        }

    def _drop_absent(self, device: torch.device) -> None:
        for i, name in enumerate(self.partition.layers):
            if i not in self._owned:
                make_absent(self._layers[i], lambda n, name=name: f"parameter '{name}.{n}'", device)  # type: ignore[misc]
        for name, stage in self.partition.outside.items():
            if stage != self.index:
                make_absent(self.module.get_submodule(name), lambda n, name=name: f"parameter '{name}.{n}'", device)  # type: ignore[misc]

    # -- hooks ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Hook the module: from now on a step run by :meth:`run` is cut. :meth:`remove` undoes it."""
        for i, (name, layer) in enumerate(zip(self.partition.layers, self._layers, strict=True)):
            if i in self._owned:
                self._hooks.append(layer.register_forward_pre_hook(self._enter(i), with_kwargs=True))
            else:
                self._patch(layer, _AbsentLayer(self, i, AbsentForward(layer, name)))
        if not self.is_last:
            # Registered last, so it runs after the layer's own forward hooks.
            self._hooks.append(self._layers[self._owned.stop - 1].register_forward_hook(self._leave))
        for name, stage in self.partition.outside.items():
            module = self.module.get_submodule(name)
            if stage != self.index and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                self._patch(module, AbsentForward(module, name))

    def remove(self) -> None:
        """Take the hooks off. Absent parameters stay absent."""
        for hook in self._hooks:
            hook.remove()
        for module in self._patched:
            del module.forward
        self._hooks, self._patched = [], []

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        # There is no hook that answers in a module's place; an instance attribute hides the class's `forward`.
        module.forward = forward  # type: ignore[method-assign]
        self._patched.append(module)

    def _enter(self, i: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._running:  # a recomputation by activation checkpointing, or a call outside a step
                return
            self.called(i)
            absent = first_absent((args, kwargs))
            if absent is not None:
                raise RuntimeError(
                    f"Layer '{self.partition.layers[i]}' runs on stage {self.index}, but an input of it depends on "
                    f"{absent.origin}, which lives on another stage. Only what a layer returns is passed on to the "
                    f"next: let the layers hand this value on too (a tuple will do), or keep them in one stage by "
                    f"`layers` or `balance`."
                )

        return hook

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            raise _LeaveStep(output)

    def called(self, i: int) -> None:
        """Layer ``i`` is being called: is it its turn?"""
        names = self.partition.layers
        if i != self._next:
            what = "a second time" if i < self._next else f"before '{names[self._next]}'"
            raise RuntimeError(
                f"Layer '{names[i]}' was called {what}. A pipeline's layers run once each, in order: "
                f"name those that do with `layers` (now {len(names)} layers, '{names[0]}' to '{names[-1]}')."
            )
        self._next = i + 1

    def passed(self, i: int, answer: Any) -> Any:
        """Layer ``i`` is absent and answered ``answer``: put what arrived in its place, if it is the last one before
        this stage."""
        if not self._running:
            return answer
        self.called(i)
        if i != self._owned.start - 1:
            return answer
        assert self._arrival is not None
        leaves, spec = pytree.tree_flatten(answer)
        holes = [j for j, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        live = self._arrival.receive()
        if len(holes) != len(live):
            raise RuntimeError(
                f"Layer '{self.partition.layers[i]}' sent {len(live)} tensors on stage {self.index - 1}, but returns "
                f"{len(holes)} by stage {self.index}'s reckoning: its number of outputs must not depend on values."
            )
        for j, tensor in zip(holes, live, strict=True):
            leaves[j] = tensor
        return pytree.tree_unflatten(leaves, spec)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[], Any], arrival: Arrival | None) -> Any:
        """Run ``step`` on this stage.

        Args:
            step: the user's step with its arguments bound.
            arrival: what the stage before sent; None on the first stage.

        Returns:
            What ``step`` returned, on the last stage; a :class:`Departure` on the others.

        Raises:
            RuntimeError: a layer was called twice, out of order or not at all, or a value would have to cross the cut
                outside the layers' outputs.
        """
        assert (arrival is None) == self.is_first
        self._arrival, self._next, self._running = arrival, 0, True
        try:
            output = step()
        except _LeaveStep as leave:
            return self._departure(leave.output)
        finally:
            self._arrival, self._running = None, False
        if self._next < len(self._layers):
            raise RuntimeError(
                f"Layer '{self.partition.layers[self._next]}' was not called by the step. A pipeline's layers run once "
                f"each, in order: leave out those that don't with `layers`."
            )
        absent = first_absent(output)
        if absent is not None:
            raise RuntimeError(
                f"What the step returned on stage {self.index} depends on {absent.origin}, which lives on another "
                f"stage. A value reaches later stages only through what the layers return. If it is a module that is "
                f"owned by the wrong stage, name it as the first or the last of `layers`."
            )
        return output

    def _departure(self, output: Any) -> Departure:
        leaves = pytree.tree_leaves(output)
        absent = first_absent(leaves)
        if absent is not None:
            raise RuntimeError(
                f"The output of layer '{self.partition.layers[self._owned.stop - 1]}' on stage {self.index} depends on "
                f"{absent.origin}, which lives on another stage."
            )
        return Departure([leaf for leaf in leaves if isinstance(leaf, Tensor)])


class _AbsentLayer:
    """``forward`` of a layer on another stage."""

    def __init__(self, stage: Stage, index: int, forward: AbsentForward) -> None:
        self._stage, self._index, self._forward = stage, index, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._forward(*args, **kwargs)
        return self._stage.passed(self._index, answer)


def shared_by(partition: Partition, stage: int) -> dict[str, Sequence[int]]:
    """Parameters of ``stage`` that other stages hold too, with all stages that do."""
    return {name: stages for name, stages in partition.shared().items() if stage in stages}
