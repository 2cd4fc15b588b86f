"""Runs the user's own step on this rank, up to a chunk's last call of a unit.

A *unit* is a module that is run or answered as a whole. Layers are the units between which the model is cut.

The step (``training_step``, any callable) runs on every stage, from its first line. The units of other chunks return
absent tensors (``absent/tensor.py``), for the cost of a look-up. Where the output of such a call is needed in this
chunk or later (``cuts/flow.py``), it returns what arrived from the previous chunk, in the structure that the unit
itself returns. So the code between the units (unpacking tuples, masks, residual scaling) runs as written, on live
values. The chunk's last call doesn't return: the user's step is left there. In the last chunk it goes on to the loss.
``forward_pass.py`` remembers what happens in one such pass::

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

A stage may run several chunks of the step, one after the other (``schedules/actions.py``). Each is a run of the step of
its own: while one of them runs, the units of the stage's other chunks are as absent as those of other stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.absent.answers import AbsentForward
from lightning_parallel.absent.module import make_absent
from lightning_parallel.absent.tensor import AbsentTensor, AbsentValueError, first_absent
from lightning_parallel.backward.recompute import Recomputed
from lightning_parallel.cuts.flow import Flow
from lightning_parallel.cuts.flow_of_step import flow_of_step
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.interception import Interception, LeaveStep, can_intercept
from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.pipeline.forward_pass import Cuts, ForwardPass
from lightning_parallel.private.torch.modules import forward_hooks, has_hooks_before
from lightning_parallel.ranks.local_model import saved_buffers
from lightning_parallel.seeding import Generators, mix
from lightning_parallel.tracing.put_back import AttributesKept
from lightning_parallel.tracing.trace import Call


class Stage:
    """One stage of a partitioned module: it makes the rest absent, and runs steps cut at its bounds.

    Args:
        module: the whole module. The parameters and buffers of other stages are made absent here.
        partition: the stages that hold, and the chunks that run, each part of the module.
        device: the device that absent tensors report.

    Attributes:
        layers: the names of this stage's layers, in the order of their first calls here, each once.
        chunks: the chunks that this stage runs.
        has_last_chunk: does it run the end of steps?
        cuts: by chunk the cuts around it.
    """

    def __init__(self, module: nn.Module, partition: Partition, index: int, device: torch.device) -> None:
        self.module = module
        self.partition = partition
        self.index = index
        self.chunks = partition.chunks_of(index)
        self.has_last_chunk = partition.chunks - 1 in self.chunks
        self.layers = list(dict.fromkeys(partition.layers[i] for c in self.chunks for i in partition.layers_of(c)))
        self._units = {name: module.get_submodule(name) for name in partition.units}
        self._on_units, self._for_flow = Interception(), Interception()
        nothing = (frozenset[Call](),) * partition.chunks
        self._flow = Flow(((),) * (partition.chunks - 1), (None,) * partition.chunks, nothing)
        self._generators = Generators(device)
        self.cuts = {chunk: Cuts(self._flow, partition, chunk) for chunk in self.chunks}
        self._wanted = set[str]()  # the modules with outputs that a later chunk needs
        # By unit here with such an output: the hook that keeps it.
        self._returned_hooks: dict[str, Callable[..., None]] = {}
        self._own = {name for name in partition.units if index in partition.stages_with(name)}
        # While another chunk runs, this stage's own units answer too, without their values.
        self._absent = {name: AbsentForward(unit, name, name in self._own) for name, unit in self._units.items()}
        self._pass: ForwardPass | None = None  # None outside a step
        self._in_trial = False
        self._in_backward = False  # in which layers may run again (activation checkpointing)
        # By name, for each unit that runs: the seed to set after it, and its call.
        self._running: dict[str, tuple[int, Call | None]] = {}
        self._announced: Counter[str] = Counter()  # calls of wrapped units that have passed their hooks
        held = {id(p) for name, p in module.named_parameters() if index in partition.owners[name]}
        held |= {id(b) for name, b in module.named_buffers() if index in partition.buffers.get(name, ())}
        for name, unit in self._units.items():
            if name not in self._own:
                make_absent(unit, name, device, kept=held)
        self._recompute: bool | None = None  # None while no hooks are installed

    @property
    def flow(self) -> Flow:
        """What crosses the cuts. Set it to the flow of the step that is about to run."""
        return self._flow

    @flow.setter
    def flow(self, flow: Flow) -> None:
        before = self._flow.transparent, self._flow.inside, self._wanted
        self._flow = flow
        self.cuts = {chunk: Cuts(flow, self.partition, chunk) for chunk in self.chunks}
        self._wanted = {name for cuts in self.cuts.values() for name, _ in cuts.wanted}
        if before != (flow.transparent, flow.inside, self._wanted) and self._recompute is not None:
            self._for_flow.remove()
            self._install_for_flow()

    @property
    def runs_last_chunk(self) -> bool:
        """Is this stage running the last chunk now?"""
        return self._pass is not None and self._pass.cuts.chunk == self.partition.chunks - 1

    def runs(self, unit: str) -> bool:
        """Is a unit running here now in a microbatch's own forward? Not in a trial, nor again in the backward."""
        return not self._in_trial and self._running.get(unit, (0, None))[1] is not None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters held here, under their original (first) names; tied ones once."""
        return {
            self.partition.aliases[name]: parameter
            for name, parameter in self.module.named_parameters()
            if not isinstance(parameter, AbsentTensor)
        }

    def used_only_in(self, chunk: int) -> list[str]:
        """The parameters held here, by their first names, to whose gradients no other chunk of this stage adds."""
        uses, own = self.partition.uses, frozenset(self.chunks)
        return [name for name in self.named_parameters() if uses[name] & own == {chunk}]

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers held here that belong in a checkpoint."""
        buffers = saved_buffers(self.module)
        return {name: buffer for name, buffer in buffers.items() if not isinstance(buffer, AbsentTensor)}

    def flow_of(self, step: Callable[[], Any], logged: Sequence[Any] = ()) -> Flow:
        """What crosses the cuts in ``step`` (:func:`.flow_of_step.flow_of_step`)."""
        recompute = self._recompute
        self.remove()  # it asks the modules themselves
        try:
            return flow_of_step(self.module, self.partition, step, logged)
        finally:
            if recompute is not None:
                self.install(recompute)

    # -- hooks ---------------------------------------------------------------------------------------------------
    # The hooks are torch.compiler.disabled: a compiled step, model or layer is compiled between them. A call
    # passes:
    #
    #     a unit of this chunk     the user's pre-hooks  _enter  forward  (_returned)  the user's hooks  _leave
    #     a unit of another one    the user's pre-hooks  _answer                       the user's hooks
    #
    # _returned is there only if a later chunk needs the unit's output.

    def install(self, recompute: bool = False) -> None:
        """Hook the module. From now on a step that :meth:`run` runs is cut. :meth:`remove` undoes it.

        Args:
            recompute: activation checkpointing: the layers of this stage keep only their inputs, and run again in the
                backward, where ``WeightVersions.backward`` gives them the weights of their forward.
        """
        for name, unit in self._units.items():
            if name not in self._own:
                # Not a hook: it can't keep the forward from running.
                answer = torch.compiler.disable(partial(self._answer, name, unit.forward))
                self._on_units.instead(unit, answer)
                continue
            once = unit.forward
            if recompute and name in self.layers and any(True for _ in unit.parameters()):
                # Inside the hooks, which a second run doesn't pass. Layers without parameters are small, and may work
                # in place (nn.ReLU(inplace=True)), which can't be run twice.
                self._on_units.instead(unit, Recomputed(unit, unit.forward))
            several = len(self.partition.units[name]) > 1 or len(self.chunks) > 1
            if several or name in self.partition.direct:
                self._on_units.before(unit, partial(self._announce, name))
                self._on_units.instead(unit, partial(self._wrapped, name, unit.forward, once))
            else:
                self._on_units.before(unit, partial(self._enter, name))
            self._on_units.after(unit, partial(self._leave, name), first=False)
        self._recompute = recompute
        self._install_for_flow()

    def _install_for_flow(self) -> None:
        """Put hooks on the units whose outputs are to be kept, and on the modules inside transparent units."""
        self._returned_hooks = {name: partial(self._returned, name) for name in self._wanted & self._own}
        for name, hook in self._returned_hooks.items():
            self._for_flow.after(self._units[name], hook, first=True)
        for name in self._flow.transparent & self._units.keys():
            for short, part in self._units[name].named_modules():
                inner = f"{name}.{short}"
                if not short or not can_intercept(part):
                    continue
                if name not in self._own or len(self.chunks) > 1:
                    absent = AbsentForward(part, inner)
                    self._for_flow.instead(part, partial(self._inside, name, inner, absent, part.forward))
                if name in self._own and inner in self._flow.inside:
                    self._for_flow.after(part, partial(self._returned_inside, name, inner), first=True)

    def remove(self) -> None:
        """Remove the hooks. Absent parameters stay absent."""
        self._for_flow.remove()
        self._on_units.remove()
        self._recompute = None

    # -- units of this stage -------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _announce(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a wrapped unit is called, and that its hooks will run."""
        self._announced[name] += 1

    @torch.compiler.disable
    def _wrapped(
        self, name: str, forward: Callable[..., Any], once: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a unit that several chunks call, or that the step calls past its hooks, or of a unit on a
        stage with several chunks. Where the unit is absent, its code runs ``once``, and not again in the backward."""
        hooked = self._announced[name] > 0
        self._announced[name] -= hooked
        if self._pass is None and not self._in_backward:
            return forward(*args, **kwargs)
        if self._pass is not None and self._pass.chunk_of(name) != self._pass.cuts.chunk:
            return self._answer(name, once, *args, **kwargs)
        unit = self._units[name]
        self._enter(name, unit, args, kwargs)
        output = forward(*args, **kwargs)
        if not hooked:
            self._returned(name, unit, args, output)
            self._leave(name, unit, args, output)
        return output

    @torch.compiler.disable
    def _enter(self, name: str, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the forward of a unit of this stage."""
        if self._pass is None and not self._in_backward:
            return
        seed = mix(torch.initial_seed(), name)  # by the rule in seeding.py, before the unit draws
        absent = first_absent([*args, *kwargs.values()])
        if self._in_backward and absent is not None:
            raise RuntimeError(
                f"'{name}' runs again in the backward of stage {self.index}, in a checkpoint that began on an earlier "
                f"stage, where its input is: a checkpoint must not span layers of two stages. Checkpoint each layer by "
                f"itself, or use activation_checkpointing=True."
            )
        call = None if self._pass is None else self._pass.called(name)
        self._running[name] = seed, call
        if call is not None and absent is not None:
            raise RuntimeError(
                f"'{name}' runs on stage {self.index}, but an input of it depends on {absent.origin}, which lives on "
                f"another stage. What a pipeline's stages hand on is what the first step of a kind needs, and must not "
                f"change from batch to batch: call it with the same kinds of inputs in every batch."
            )

    @torch.compiler.disable
    def _returned(self, name: str, unit: nn.Module, args: Any, output: Any) -> None:
        """Keep what later stages need, right after the forward of a unit of this stage. The user's hooks on its output
        come after this, and run on the other stages too."""
        if self._pass is None or name not in self._running:
            return
        call, cuts = self._running[name][1], self._pass.cuts
        if call in cuts.wanted:
            if has_hooks_before(unit, self._returned_hooks[name]):
                raise RuntimeError(
                    f"A forward hook was registered on '{name}' in mid-training with prepend=True: it would run on "
                    f"this stage and once more on the next one. Register it before training, or without prepend."
                )
            # Two hooks are this stage's. The user's come after this one, and may write to the output.
            self._pass.keep(call, output, copied=call != cuts.last or forward_hooks(unit) > 2)

    @torch.compiler.disable
    def _leave(self, name: str, unit: nn.Module, args: Any, output: Any) -> None:
        """Leave the step after the chunk's last call: after the forward of a unit of this stage and the user's hooks on
        it."""
        if name not in self._running:
            return
        seed, call = self._running.pop(name)
        # Every stage draws the same numbers after a unit, also where the unit is absent (`_answer`).
        self._generators.seed(seed, host=name in self.partition.draw_on_host)
        if self._pass is not None and call is not None and call == self._pass.cuts.last:
            raise LeaveStep

    @torch.compiler.disable
    def _returned_inside(self, unit: str, name: str, part: nn.Module, args: Any, output: Any) -> None:
        """Runs after the forward of a module inside a transparent unit of this stage."""
        if self._pass is not None and unit in self._running:
            call = self._pass.called(name)
            if call in self._pass.cuts.wanted:
                self._pass.keep(call, output)

    # -- units of other chunks -----------------------------------------------------------------------------------

    def _answer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a unit whose call another chunk runs: its arrived output, or absent tensors. Not to be
        compiled."""
        running, absent = self._pass, self._absent[name]
        if running is None:
            return absent.answer(args, kwargs)
        seed = mix(torch.initial_seed(), name)  # by the rule in seeding.py, before the unit draws
        call = running.called(name)
        answer = self._answer_for(call, absent, forward, args, kwargs, openly=name in self._flow.transparent)
        self._generators.seed(seed, host=name in self.partition.draw_on_host)  # as in `_leave`
        if call == running.cuts.last:  # of the step: an evaluation may leave the last layers out
            raise LeaveStep
        return answer

    @torch.compiler.disable
    def _inside(
        self, unit: str, name: str, absent: AbsentForward, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a module inside a transparent unit."""
        if unit in self._running or self._pass is None:
            return forward(*args, **kwargs)
        return self._answer_for(self._pass.called(name), absent, forward, args, kwargs, openly=True)

    def _answer_for(
        self, call: Call, absent: AbsentForward, forward: Callable[..., Any], args: Any, kwargs: Any, *, openly: bool
    ) -> Any:
        """What a call returns that another chunk runs. ``openly``: the module's own code runs on absent tensors, so
        that hooks inside it fire. Otherwise, and if that needs values, the module is answered for as a whole, and calls
        that it makes meanwhile don't count as calls of the step."""
        running = self._pass
        assert running is not None, "in a step"
        if openly:
            try:
                with absent.without_values():
                    return running.filled(forward(*args, **kwargs), call)
            except AbsentValueError:
                pass
        self._pass = None
        try:
            answer = absent.answer(args, kwargs, call[1])
        finally:
            self._pass = running
        return running.filled(answer, call)

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        arrival: Arrival | None,
        chunk: int,
        *,
        trial: bool = False,
    ) -> Any:
        """Run a chunk of ``step``.

        Args:
            step: the user's step with its arguments bound.
            arrival: what the previous chunk sent; None for the first chunk.
            trial: it is no microbatch's own forward.

        Returns:
            What ``step`` returned, for the last chunk; the tensors to send on for the others.

        Raises:
            RuntimeError: units were called otherwise than in the dry run of the step, so that the flow doesn't fit; or
                what the step makes here depends on a value that only another stage has; or a hook is on the gradient of
                what arrived.
        """
        assert (arrival is None) == (chunk == 0)
        self._pass = forward = ForwardPass(self.cuts[chunk], arrival)
        self._in_trial = trial
        kept = AttributesKept(self.module, self._flow.put_back) if self._flow.put_back else None
        has_left = False
        try:
            output = step()
        except LeaveStep:
            has_left = True
            if kept is not None:
                kept.put_back()
        finally:
            self._pass = None
            self._running.clear()
        forward.refuse_hooks()
        if has_left:
            return forward.departure()
        if chunk < self.partition.chunks - 1:
            raise RuntimeError(
                f"The step has ended on {self.partition.name_of(chunk)} of {self.partition.stages}, before it called "
                f"what later ones own. In the first step it called that. Make the same calls in the same order in each "
                f"batch, and skip no batch by returning None."
            )
        absent = first_absent(output)
        if absent is not None:
            raise RuntimeError(
                f"What the step returned on stage {self.index} depends on {absent.origin}, which lives on another "
                f"stage. Outputs of modules cross between stages if the first step shows that they are needed, but not "
                f"what is used in later steps only, or after the step has asked for a value (.item(), a mask of "
                f"what layers return). Use it in each step, before that, with a weight: "
                f"loss + float(global_step >= 100) * term."
            )
        return output

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context for a backward: a step's layers may run again in it (activation checkpointing), drawing the same
        numbers."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._running.clear()
