"""Intercepts modules' calls, by hooks and by instance attributes, and undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LeaveStep(BaseException):
    """Raised to leave the user's step in the middle. It is a BaseException, so that ``except Exception`` in the user's
    code lets it pass."""


class Interception:
    """What has been put on modules, to be removed again."""

    def __init__(self) -> None:
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._patched: list[tuple[nn.Module, Callable[..., Any] | None]] = []

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before each call, after the user's hooks so far."""
        self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None], *, first: bool) -> None:
        """Call ``hook(module, args, output)`` after each call, before the user's hooks or after those so far."""
        self._hooks.append(module.register_forward_hook(hook, prepend=first))

    def instead(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Call ``forward`` in the place of the module's. It is set as an instance attribute, which hides the class's
        method; the user may have set one too."""
        self._patched.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Remove everything, and put back what was there."""
        for hook in self._hooks:
            hook.remove()
        for module, forward in reversed(self._patched):
            if forward is None:
                del module.forward
            else:
                module.forward = forward  # type: ignore[method-assign]
        self._hooks, self._patched = [], []


def can_intercept(part: nn.Module) -> bool:
    """Can a module's forward be replaced? Not if it has none, nor if it is TorchScript."""
    return not isinstance(part, torch.jit.ScriptModule) and type(part).forward is not nn.Module.forward
