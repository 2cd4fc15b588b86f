"""What runs on this rank: the user's own step, cut at the stage's first and last layer.

The step (``training_step``, any callable) runs on every stage, from its first line. The layers of earlier stages return
absent tensors (``absent.py``), at no cost. The layer just before the cut returns what arrived from the previous stage,
in the structure that the layer itself returns. So do other owned modules whose output is needed here
(``flow.py``). So the code between the layers (unpacking tuples, masks, residual scaling) runs as written, on live
values. The stage's last layer doesn't return: its output is the stage's output, and the user's step is left there. On
the last stage the step goes on to the loss. ``forward_pass.py`` remembers what happens in one such pass::

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.absent import AbsentForward, AbsentTensor, first_absent, make_absent
from lightning_parallel.pipeline.arrival import Arrival
from lightning_parallel.pipeline.flow import Call, Flow, chain_only, survey
from lightning_parallel.pipeline.forward_pass import Cuts, ForwardPass
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.recompute import recomputed
from lightning_parallel.pipeline.seeding import TorchGenerators, draw_seed
from lightning_parallel.torch_private import tree_flatten, tree_unflatten


class _LeaveStep(BaseException):
    """Raised after the stage's last layer, with its output. It is a BaseException, so that ``except Exception`` in the
    user's code lets it pass."""


class Stage:
    """One stage of a partitioned module: it makes the rest absent, and runs steps cut at its bounds.

    Args:
        module: the whole module. Its other stages' parameters and buffers are made absent here.
        partition: who owns what.
        index: the stage to be.
        device: where absent tensors are said to be.

    Attributes:
        layers: the names of this stage's layers, in order.
        is_first, is_last: its place in the pipeline.
    """

    def __init__(self, module: nn.Module, partition: Partition, index: int, device: torch.device) -> None:
        self.module = module
        self.partition = partition
        self.index = index
        self.layers = [partition.layers[i] for i in partition.layers_of(index)]
        self.is_first, self.is_last = index == 0, index == partition.stages - 1
        self.flow = chain_only(partition)
        owned = {*self.layers, *(name for name, stage in partition.outside.items() if stage == index)}
        self._owned_modules = {name: module.get_submodule(name) for name in (*partition.layers, *partition.outside)}
        self._layer_indices = {name: i for i, name in enumerate(partition.layers)}
        self._absent = {name: AbsentForward(owned_module, name) for name, owned_module in self._owned_modules.items()}
        self._elsewhere = [name for name in self._owned_modules if name not in owned]
        self._generators = TorchGenerators(device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._patched: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._pass: ForwardPass | None = None  # outside a run the hooks do nothing
        self._in_backward = False
        self._running: dict[
            str, tuple[int, Call | None]
        ] = {}  # owned modules: the seed for after it, and which call it is
        for name in self._elsewhere:
            make_absent(self._owned_modules[name], partial("parameter '{}.{}'".format, name), device)

    @property
    def flow(self) -> Flow:
        """What crosses the cuts. Set it to that of the step to be run."""
        return self._flow

    @flow.setter
    def flow(self, flow: Flow) -> None:
        self._flow, self._cuts = flow, Cuts.of(flow, self.partition, self.index)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters held here, under their original (first) names; tied ones once."""
        return {
            self.partition.aliases[name]: parameter
            for name, parameter in self.module.named_parameters()
            if not isinstance(parameter, AbsentTensor)
        }

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers held here that belong in a checkpoint."""
        persistent = self.module.state_dict(keep_vars=True)
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name in persistent and not isinstance(buffer, AbsentTensor)
        }

    def survey(self, step: Callable[[], Any], logged: Sequence[Any] = ()) -> Flow:
        """What crosses the cuts in ``step`` (:func:`.flow.survey`)."""
        return survey(self.module, self.partition, self._absent, step, logged)

    # -- hooks ---------------------------------------------------------------------------------------------------
    # Where the user compiles a step, a model or a layer, torch.compile gets what is between the hooks.

    def install(self, recompute: bool = False) -> None:
        """Hook the module. From now on a step that :meth:`run` runs is cut. :meth:`remove` undoes it.

        Args:
            recompute: activation checkpointing: the layers of this stage keep only their inputs, and run again in the
                backward, where ``Weights.backward`` gives them the weights of their forward.
        """
        for name in self._elsewhere:
            # No hook answers in a module's place. An instance attribute hides the class's `forward`.
            self._patch(self._owned_modules[name], partial(self._answer, name))
        for name, owned_module in self._owned_modules.items():
            if name not in self._elsewhere:
                self._hooks.append(owned_module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                # Registered last, so it runs after the module's own forward hooks.
                self._hooks.append(owned_module.register_forward_hook(partial(self._leave, name)))
                if recompute and name in self._layer_indices and any(True for _ in owned_module.parameters()):
                    # Inside the hooks, which a second run doesn't pass. Layers without parameters are small, and may
                    # work in place (nn.ReLU(inplace=True)), which can't be run twice.
                    self._patch(owned_module, partial(recomputed, owned_module.forward))

    def remove(self) -> None:
        """Take the hooks off. Absent parameters stay absent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for owned_module, forward in self._patched:
            if forward is None:
                del owned_module.forward
            else:
                owned_module.forward = forward
        self._patched = []

    def _patch(self, owned_module: nn.Module, forward: Callable[..., Any]) -> None:
        self._patched.append((owned_module, owned_module.__dict__.get("forward")))  # the user may have done the same
        owned_module.forward = forward  # type: ignore[method-assign]

    @torch.compiler.disable
    def _answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The forward of an owned module on another stage: what arrived of it, or absent tensors."""
        if self._pass is None:
            return self._absent[name].answer(args, kwargs)
        seed = draw_seed()
        call = self._pass.called(name, self._layer_indices.get(name))
        answer = self._absent[name].answer(args, kwargs, call[1])
        self._generators.seed(seed)
        live = self._pass.arrived(call)
        return answer if live is None else _filled(answer, live, name)

    @torch.compiler.disable
    def _enter(self, name: str, owned_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward of an owned module of this stage."""
        if self._pass is None and not self._in_backward:
            return
        seed = draw_seed()
        absent = first_absent((args, kwargs))
        if self._in_backward and absent is not None:
            raise RuntimeError(
                f"'{name}' runs again in the backward of stage {self.index}, in a checkpoint that began on an earlier "
                f"stage, where its input is: a checkpoint must not span layers of two stages. Checkpoint each layer by "
                f"itself, or use activation_checkpointing=True."
            )
        call = None if self._pass is None else self._pass.called(name, self._layer_indices.get(name))
        self._running[name] = seed, call
        if call is not None and absent is not None:
            raise RuntimeError(
                f"'{name}' runs on stage {self.index}, but an input of it depends on {absent.origin}, which lives on "
                f"another stage. Outputs of modules cross between stages, parameters don't: use a parameter inside its "
                f"module only, or keep both in one stage by `layers` or `balance`."
            )

    @torch.compiler.disable
    def _leave(self, name: str, owned_module: nn.Module, args: Any, output: Any) -> None:
        """After the forward of an owned module of this stage: keep what later stages need; after the last layer,
        leave."""
        if self._pass is None and not self._in_backward:
            return
        seed, call = self._running.pop(name)
        self._generators.seed(seed)
        if self._pass is None or call is None:
            return
        wanted = call in self._cuts.wanted
        leaving = not self.is_last and name == self.layers[-1]
        if (leaving or wanted) and self._pass.grad and not torch.is_grad_enabled():
            self._refuse_without_gradient(name, owned_module)
        if wanted:
            self._pass.keep(call, output)
        if leaving:
            raise _LeaveStep(output)

    def _refuse_without_gradient(self, name: str, owned_module: nn.Module) -> None:
        # A checkpoint with use_reentrant=True runs its part without gradients, and makes up for it after the part: too
        # late for an output that leaves the stage from inside.
        if any(parameter.requires_grad for parameter in owned_module.parameters()):
            raise RuntimeError(
                f"'{name}' hands its output from stage {self.index} to a later one, but runs under torch.no_grad() or "
                f"in a checkpoint with use_reentrant=True, so no gradient would come back: use use_reentrant=False, or "
                f"freeze it with requires_grad_(False)."
            )

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        arrive: Callable[[], Arrival] | None,
        expect: Callable[[], Arrival | None] | None = None,
    ) -> Any:
        """Run ``step`` on this stage.

        Args:
            step: the user's step with its arguments bound.
            arrive: gives what the previous stage sent; called once, when the step needs it. None on the first stage.
            expect: gives what ``arrive`` will most likely give, if that is known before. Its values need not have come.

        Returns:
            What ``step`` returned, on the last stage; a :class:`.arrival.Departure` on the others.

        Raises:
            RuntimeError: a layer was called twice, out of order or not at all, or a value would have to cross the cut
                that can't.
        """
        assert (arrive is None) == self.is_first
        self._pass = forward = ForwardPass(self._cuts, arrive, expect)
        left = False
        try:
            output = step()
        except _LeaveStep as leave:
            left = True
            output = forward.departure(leave.args[0]) if forward.lost is None else None
        except BaseException:
            if forward.lost is None:
                raise
        finally:
            self._pass = None
            lost, forward.lost = forward.lost, None
        if lost is not None:  # whatever the step made of it
            try:
                raise lost
            finally:
                del lost  # or its traceback would hold this frame, and this frame the links of the stage
        if left:
            return output
        forward.check_complete()
        absent = first_absent(output)
        if absent is not None:
            raise RuntimeError(
                f"What the step returned on stage {self.index} depends on {absent.origin}, which lives on another "
                f"stage. Outputs of modules cross between stages if the first step shows that they are needed, but not "
                f"what is used only after the step has asked for a value (.item(), a mask as an index): compute that "
                f"before. Parameters don't cross. (Weights that are tied by hand, as in "
                f"F.linear(x, self.embedding.weight), can be tied as a module's parameter instead: self.head.weight = "
                f"self.embedding.weight.)"
            )
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: a step's layers may run again in it (activation checkpointing), drawing the same
        numbers."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False


def _filled(answer: Any, live: list[Tensor], name: str) -> Any:
    """``answer`` with live tensors in the place of absent ones."""
    if isinstance(answer, Tensor) and len(live) == 1:
        return live[0]
    leaves, spec = tree_flatten(answer)
    holes = [j for j, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(holes) != len(live):
        raise RuntimeError(
            f"'{name}' returned {len(live)} tensors on its own stage, but {len(holes)} on another, where it was asked "
            f"on absent tensors: the number of its outputs must not depend on values."
        )
    for j, tensor in zip(holes, live, strict=True):
        leaves[j] = tensor
    return tree_unflatten(leaves, spec)
