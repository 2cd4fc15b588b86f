"""Intercepts modules' calls, by hooks and by instance attributes, and undoes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

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
        self._put_on = ExitStack()

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before each call, after the hooks that the user has registered by now."""
        self._hook(module, module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None], *, first: bool) -> None:
        """Call ``hook(module, args, output)`` after each call, before the user's hooks or after
        those that are registered by now."""
        self._hook(module, module.register_forward_hook(hook, prepend=first))

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Call ``forward`` in the place of the module's. It is set as an instance attribute, which hides the class's
        method; the user may have set one too. Its signature is the module's: some choose by it what to pass."""
        self._put_on.callback(_Alone.of(module).end)
        self._put_on.callback(_put_back, module.__dict__, module.__dict__.get("forward"))
        update_wrapper(forward, module.forward, updated=())
        module.forward = forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Remove everything, and put back what was there."""
        self._put_on.close()

    def _hook(self, module: nn.Module, hook: RemovableHandle) -> None:
        alone = _Alone.of(module)
        alone.hooks.add(hook.id)
        self._put_on.callback(alone.end)
        self._put_on.callback(hook.remove)


class _Alone:
    """An intercepted module's ``__reduce_ex__``, which ``copy`` and ``pickle`` call: it leaves out all interceptions.
    It is set as an attribute of the instance, where they find it before the class's.

    Attributes:
        hooks: the ids of the hooks that were put on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = module.__dict__
        self._forward: Callable[..., Any] | None = module.__dict__.get("forward")  # the user's own
        self._reduce: Callable[[Any], Any] = module.__reduce_ex__
        self._interceptions = 0
        self.hooks: set[int] = set()
        module.__dict__["__reduce_ex__"] = self

    @classmethod
    def of(cls, module: nn.Module) -> _Alone:
        """The one of a module, made if there is none, for one interception more."""
        found = module.__dict__.get("__reduce_ex__")
        alone = found if isinstance(found, cls) else cls(module)
        alone._interceptions += 1
        return alone

    def __call__(self, protocol: Any) -> Any:
        make, arguments, state, *rest = self._reduce(protocol)
        if isinstance(state, dict):
            state = {key: self._without_hooks(value) if key in _HOOKS else value for key, value in state.items()}
            state.pop("__reduce_ex__")
            _put_back(state, self._forward)
        return (make, arguments, state, *rest)

    def _without_hooks(self, hooks: dict[int, Any]) -> dict[int, Any]:
        return type(hooks)((id, hook) for id, hook in hooks.items() if id not in self.hooks)

    def end(self) -> None:
        """Note that one has been removed."""
        self._interceptions -= 1
        if not self._interceptions:
            del self._attributes["__reduce_ex__"]


def _put_back(attributes: dict[str, Any], forward: Callable[..., Any] | None) -> None:
    attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward


def can_intercept(part: nn.Module) -> bool:
    """Can a module's forward be replaced? Not if it has none, nor if it is TorchScript."""
    return not isinstance(part, torch.jit.ScriptModule) and type(part).forward is not nn.Module.forward
