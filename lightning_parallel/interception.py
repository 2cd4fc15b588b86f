"""Intercepts modules' calls, by hooks and by instance attributes, and undoes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import update_wrapper
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

_HOOKS = {name for name in vars(nn.Module()) if name.startswith("_forward")}


class LeaveStep(BaseException):
    """Raised to leave the user's step in the middle. It is a BaseException, so that ``except Exception`` in the user's
    code lets it pass."""


class Invocation(NamedTuple):
    """A call of a module's ``forward``, with its arguments."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs


class Interception:
    """Hooks and forwards that have been put on modules, and can be removed again. Copies and pickles of these modules
    have none of them."""

    def __init__(self) -> None:
        # By the ids of modules: the hash of a metric changes with its state.
        self._hooks: dict[int, list[torch.utils.hooks.RemovableHandle]] = {}
        self._alone: list[_Alone] = []
        self._forwards: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before each call, after the hooks that the user has registered by now."""
        self._hooks_of(module).append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None], *, first: bool) -> None:
        """Call ``hook(module, args, output)`` after each call, before the user's hooks or after
        those that are registered by now."""
        self._hooks_of(module).append(module.register_forward_hook(hook, prepend=first))

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Call ``forward`` in the place of the module's. It is set as an instance attribute, which hides the class's
        method; the user may have set one too. Its signature is the module's: some choose by it what to pass."""
        self._hooks_of(module)
        update_wrapper(forward, module.forward, updated=())
        self._forwards.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Remove everything, and put back what was there."""
        for hook in chain.from_iterable(self._hooks.values()):
            hook.remove()
        for alone in self._alone:
            alone.forget(self)
        for module, forward in reversed(self._forwards):
            _put_back(module.__dict__, forward)
        self._hooks, self._alone, self._forwards = {}, [], []

    def removed_from(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of a module's ``__dict__`` without what is here."""
        ids = {hook.id for hook in self._hooks[id(module)]}
        state = {key: _without(ids, value) if key in _HOOKS else value for key, value in state.items()}
        for forward in (forward for patched, forward in reversed(self._forwards) if patched is module):
            _put_back(state, forward)
        return state

    def _hooks_of(self, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        if id(module) not in self._hooks:
            self._hooks[id(module)] = []
            self._alone.append(_Alone.of(module))
            self._alone[-1].interceptions.append(self)
        return self._hooks[id(module)]


class _Alone:
    """An intercepted module's ``__reduce_ex__``, which ``copy`` and ``pickle`` call: it leaves out all interceptions.
    It is set as an attribute of the instance, where they find it before the class's.

    Attributes:
        interceptions: those of the module, in the order in which they began.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.interceptions: list[Interception] = []
        self._reduce: Callable[[Any], Any] = module.__reduce_ex__
        module.__dict__["__reduce_ex__"] = self

    @classmethod
    def of(cls, module: nn.Module) -> _Alone:
        """The one of a module, made if there is none."""
        found = module.__dict__.get("__reduce_ex__")
        return found if isinstance(found, cls) else cls(module)

    def __call__(self, protocol: Any) -> Any:
        make, arguments, state, *rest = self._reduce(protocol)
        if isinstance(state, dict):
            for interception in reversed(self.interceptions):
                state = interception.removed_from(self._module, state)
            state.pop("__reduce_ex__")
        return (make, arguments, state, *rest)

    def forget(self, interception: Interception) -> None:
        """Note that an interception has been removed."""
        self.interceptions.remove(interception)
        if not self.interceptions:
            del self._module.__dict__["__reduce_ex__"]


def _put_back(attributes: dict[str, Any], forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del attributes["forward"]
    else:
        attributes["forward"] = forward


def _without(ids: Collection[int], hooks: dict[int, Any]) -> dict[int, Any]:
    return type(hooks)((id, hook) for id, hook in hooks.items() if id not in ids)


def can_intercept(part: nn.Module) -> bool:
    """Can a module's forward be replaced? Not if it has none, nor if it is TorchScript."""
    return not isinstance(part, torch.jit.ScriptModule) and type(part).forward is not nn.Module.forward
