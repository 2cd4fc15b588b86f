"""Lets optimizers that treat a parameter as a whole (Muon, LAMB, Shampoo) step parameters that ranks have divided.

Each divided parameter has an owner, one of the ranks that share it; replicas share the work, too. In an update, between
the user's closure and the optimizer's arithmetic, each owner gets the whole gradients of what it owns, and afterwards
sends the parts back::

    rank 0                                          rank 1 owns a
    a's first half's gradient    ------------->     a's gradient
                                                    the user's optimizer steps a
    a's first half               <-------------     a

The optimizer object is the user's, and steps all parameters in one call. So messages come before and after it: none is
in flight while a part is computed. While it steps, its groups have the whole parameters that this rank owns in the
place of the parts, and nothing of those that others own. Clipping, schedulers and the module's hooks see parts as
before. Hooks around an optimizer's own steps are refused.

An owner keeps the whole parameters, so that an update sends twice the divided parameters at most. Ranks compare digests
of their parts before each update: where other code has written to one, the owner gets it again. The state of an owned
parameter is the whole one's. Between updates it lies under the part, where ``optimizer.state_dict()`` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.optimizers.closures import closure_first
from lightning_parallel.optimizers.division import Division
from lightning_parallel.private.torch.modules import has_step_hooks
from lightning_parallel.ranks.collectives import gather_objects, highest, together
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.writes import digest


def give_owners(
    optimizers: Sequence[Optimizer], found: Sequence[set[int]], run: Run, local: LocalModel, until: ExitStack
) -> dict[str, bool]:
    """Give an owner to each divided parameter that optimizers step as a whole, and let them see it so until the stack
    is closed. All ranks along the axes that divide parameters call it.

    Args:
        found: for each optimizer the indices of the groups that it steps as wholes. Those count that any rank has
            found.

    Returns:
        The names of these parameters, and whether this rank owns them.
    """
    if not optimizers or not (local.shards or local.is_fully_sharded):
        return {}
    groups = [
        (group["params"], index in indices)
        for optimizer, indices in zip(optimizers, found, strict=True)
        for index, group in enumerate(optimizer.param_groups)
    ]
    agreed = [int(is_found) for _, is_found in groups]
    for axis in ("tensor", "data"):
        agreed = highest(run.groups.along(axis), *agreed)
    chosen = {id(p) for (params, _), is_found in zip(groups, agreed, strict=True) if is_found for p in params}
    divided = {name: p for name, p in local.parameters.items() if name in local.shards or isinstance(p, DTensor)}
    names = [name for name, parameter in divided.items() if id(parameter) in chosen]
    if not names:
        return {}
    replicas = [run.layout.at(rank) for rank in run.layout.peers("data")]
    ranks = run.groups.joining(rank for each in replicas for rank in each.peers("tensor"))
    division = Division(local, names, ranks, run.device)
    together(ranks, partial(Owners(local, division).install, optimizers, until))
    return division.here


class Owners:
    """Lets optimizers step the parameters of a ``division`` on their owners. ``local`` is what this rank holds."""

    def __init__(self, local: LocalModel, division: Division) -> None:
        self._local, self._division = local, division
        self._parts = {name: local.parameters[name] for name in division.here}
        self._wholes: dict[str, nn.Parameter] = {}  # of those that this rank owns
        self._digests: dict[str, int] = {}  # of this rank's parts, after the last update

    def install(self, optimizers: Sequence[Optimizer], until: ExitStack) -> None:
        """Let the optimizers' ``step`` see whole parameters, until the stack is closed.

        Raises:
            ValueError: an optimizer has hooks around its steps, or a state for a part, and of which part of the whole
                isn't known.
        """
        known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        parts = set(map(id, self._parts.values()))
        for optimizer in optimizers:
            if not any(id(p) in parts for group in optimizer.param_groups for p in group["params"]):
                continue
            _refuse_hooks(optimizer)
            self._take_state(optimizer)
            closure_first(optimizer, partial(self._stepped_whole, optimizer, known), until)

    def _take_state(self, optimizer: Optimizer) -> None:
        """Make the state whole that an optimizer has for parts before its first step, on the owners."""
        states = {name: optimizer.state.get(part, {}) for name, part in self._parts.items()}
        own = [(key, name) for name, state in states.items() for key in state if self._is_like_part(name, state[key])]
        # Of an earlier fit only the owners have states, of any shape.
        found = set(own).intersection(*gather_objects(own, self._division.group))
        for key in dict.fromkeys(key for key, _ in own):
            values = {name: state[key] for name, state in states.items() if (key, name) in found}
            for name, whole in self._division.gathered(values).items():
                states[name][key] = whole
        for name, is_here in self._division.here.items():
            state = {} if is_here else optimizer.state.pop(self._parts[name], {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and (key, name) not in found:
                    raise ValueError(
                        f"{type(optimizer).__name__} treats '{name}' as a whole, and before its first step keeps "
                        f"{key!r} of shape {tuple(value.shape)} for this rank's part of it. Let it make its state in "
                        f"its first step, as torch's optimizers do, or use strategy='ddp'."
                    )

    def _is_like_part(self, name: str, value: Any) -> bool:
        part = self._parts[name]
        is_of_shard = isinstance(value, Tensor) and name in self._local.shards and value.shape == part.shape
        return is_of_shard or isinstance(value, DTensor)

    # -- an update -----------------------------------------------------------------------------------------------

    @contextmanager
    def _stepped_whole(self, optimizer: Optimizer, known: set[int]) -> Iterator[None]:
        """While an optimizer steps, give it the whole parameters that this rank owns; then send the parts to all."""
        _refuse_hooks(optimizer)  # that were registered since
        held: set[Tensor] = {p for group in optimizer.param_groups for p in group["params"]}
        self._refuse_new(optimizer, [p for p in held if id(p) not in known])
        owned = {name: part for name, part in self._parts.items() if part in held}
        trained = self._bring(optimizer, owned) if owned else {}
        wholes: dict[Tensor, Tensor] = {
            part: self._wholes[name] for name, part in trained.items() if self._division.here[name]
        }
        hidden = set(owned.values()) - wholes.keys()
        lists = [group["params"] for group in optimizer.param_groups]
        for group, parts in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [wholes.get(p, p) for p in parts if p not in hidden]
        # The wholes have the states of their parts.
        state = optimizer.state
        states: dict[Tensor, Any] = {part: state.pop(part) for part in hidden if part in state}
        state.update((whole, state.pop(part)) for part, whole in wholes.items() if part in state)
        try:
            yield
        finally:
            state = optimizer.state  # another, where the step has begun anew
            state.update((part, state.pop(whole)) for part, whole in wholes.items() if whole in state)
            state.update(states)
            for group, parts in zip(optimizer.param_groups, lists, strict=True):
                group["params"] = parts
            for whole in wholes.values():
                whole.grad = None
        if trained:
            self._division.fill(trained, self._wholes)
            self._digests.update(_digests(trained))

    @torch.no_grad()
    def _bring(self, optimizer: Optimizer, parts: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Give the owners the whole gradients, and whole parameters where these have been written to. Returns the parts
        that the optimizer may step. Of others, which are frozen and have neither a gradient nor a state, there is no
        whole."""
        has_gradient = {name for name, part in parts.items() if part.grad is not None}
        may_move = {
            name for name, p in parts.items() if p.requires_grad or name in has_gradient or p in optimizer.state
        }
        digests = _digests({name: part for name, part in parts.items() if name in may_move or name in self._digests})
        has_changed = {name for name, found in digests.items() if found != self._digests.get(name)}
        flags = [int(name in names) for names in (has_gradient, may_move, has_changed) for name in parts]
        agreed = iter(highest(self._division.group, *flags))
        given, trained, stale = ({name: part for name, part in parts.items() if next(agreed)} for _ in range(3))
        for name, whole in self._division.gathered(stale).items():
            if name in self._wholes:
                self._wholes[name].copy_(whole)
            else:
                self._wholes[name] = nn.Parameter(whole)
        for name in self._wholes.keys() & parts:
            self._wholes[name].__dict__ = vars(parts[name])  # what the user or the optimizer notes on one
            self._wholes[name].requires_grad_(parts[name].requires_grad)
        gradients = {name: torch.zeros_like(part) if part.grad is None else part.grad for name, part in given.items()}
        for name, gradient in self._division.gathered(gradients).items():
            self._wholes[name].grad = gradient
        return trained

    # -- refusals ------------------------------------------------------------------------------------------------

    def _refuse_new(self, optimizer: Optimizer, new: Iterable[Tensor]) -> None:
        for part in new:
            name = self._local.names.get(id(part), "")
            if name in self._local.shards or isinstance(part, DTensor):
                raise RuntimeError(
                    f"{type(optimizer).__name__} got '{name}' after training had begun. It treats parameters as whole "
                    f"ones, and ranks have parts. Give configure_optimizers all parameters, frozen ones too, and "
                    f"unfreeze them during training."
                )


def _refuse_hooks(optimizer: Optimizer) -> None:
    """They would run while owners have the whole parameters: what they read of the module is as before the step, and
    what they write there is lost."""
    if has_step_hooks(optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} has a hook of register_step_pre_hook or register_step_post_hook, or all optimizers have one. It "
            f"treats parameters as whole ones, and ranks have parts, which a hook would see before they are stepped. "
            f"Do it in on_train_batch_end."
        )


def _digests(parts: Mapping[str, Tensor]) -> dict[str, int]:
    if not parts:
        return {}
    found = torch.stack([digest(local_part(part)) for part in parts.values()])  # one read for all
    return dict(zip(parts, found.tolist(), strict=True))
