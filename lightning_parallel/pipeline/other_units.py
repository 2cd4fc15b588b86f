"""Answers for the units that other chunks run (``stage.py``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.absent.answers import AbsentForward
from lightning_parallel.absent.tensor import AbsentValueError
from lightning_parallel.interception import LeaveStep
from lightning_parallel.pipeline.forward_pass import Underway
from lightning_parallel.private.torch import tree_flatten, tree_unflatten
from lightning_parallel.seeding import draw_seed


class OtherUnits:
    """Returns the output of a call that has arrived, or absent tensors.

    Args:
        units: all units of the module, by name.
        own: the names of the units that this stage holds. While another chunk runs, they answer without their values.
        underway: the state of the step that is running.
    """

    def __init__(self, units: Mapping[str, nn.Module], own: Collection[str], underway: Underway) -> None:
        self._absent = {name: AbsentForward(unit, name, has_values=name in own) for name, unit in units.items()}
        self._underway = underway

    def answer(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a unit whose call another chunk runs: its arrived output, or absent tensors. Not to be
        compiled."""
        if self._underway.forward is None:
            return self._absent[name].answer(args, kwargs)
        # The next chunk's turn already: the step makes fewer calls here than in the dry run, or none.
        if self._underway.forward.chunk_of(name) > self._underway.forward.cuts.chunk:
            raise LeaveStep
        seed = draw_seed()
        call = self._underway.forward.called(name)
        if name in self._underway.flow.transparent:
            with self._absent[name].without_values():
                answer = self._openly(self._absent[name], forward, args, kwargs, call[1])
        else:
            answer = self._answer_alone(self._absent[name], args, kwargs, call[1])
        self._underway.seed_after(name, seed)
        return _filled(answer, self._underway.forward.arrived.get(call), name)

    def _answer_alone(self, absent: AbsentForward, args: tuple[Any, ...], kwargs: dict[str, Any], call: int) -> Any:
        """Answer for a module as a whole. Calls that it makes meanwhile don't count as calls of the step."""
        forward_pass, self._underway.forward = self._underway.forward, None
        try:
            return absent.answer(args, kwargs, call)
        finally:
            self._underway.forward = forward_pass

    @torch.compiler.disable
    def answer_inside(
        self, name: str, absent: AbsentForward, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a module inside a transparent unit that doesn't run."""
        if self._underway.forward is None:
            return forward(*args, **kwargs)
        call = self._underway.forward.called(name)
        answer = self._openly(absent, forward, args, kwargs, call[1])
        return _filled(answer, self._underway.forward.arrived.get(call), name)

    def _openly(
        self,
        absent: AbsentForward,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: int,
    ) -> Any:
        """Run a transparent unit's own code on absent tensors, so that hooks inside it fire. If it needs values, it is
        answered for as a whole."""
        try:
            return forward(*args, **kwargs)
        except AbsentValueError:
            return self._answer_alone(absent, args, kwargs, call)


def _filled(answer: Any, live: list[Tensor] | None, name: str) -> Any:
    """``answer`` with the arrived tensors, if some have arrived, in the place of absent ones."""
    if live is None:
        return answer
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
