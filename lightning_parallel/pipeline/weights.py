"""Which weights a microbatch runs with.

A synchronous schedule has one version of the weights between two steps, and autograd needs no help
(:class:`CurrentWeights`). An asynchronous one steps while microbatches are in flight, whose backward must not see the
new weights (:class:`WeightVersions`).

    update       ----- 0 ------- 1 ------- 2 ------->
    forward 3    uses version 1                        its leaves share memory with the parameters,
    step 1                      the parameters move to a copy, and the optimizer changes the copy
    backward 3                            uses version 1, kept alive by the leaves

A microbatch's forward runs on *leaves*: detached tensors that share the parameters' memory. A step that finds a
version in flight first moves the parameters (``p.data = p.data.clone()``), so the optimizer's in-place update leaves
the version whole: one copy an update, none a microbatch, and the forward is free. The rivals fail, most of them
silently: changing ``p.data`` alone gives wrong input gradients in every layer but a few, of which Linear is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Stashing = Literal["stash", "latest"]


class Weights(Protocol):
    """How the engine asks for weights."""

    def forward(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        """Run ``step`` with the weights that a forward starting now uses: its result, and a token for the backward."""
        ...

    def backward(self, token: Any) -> AbstractContextManager[None]:
        """A context for the backward of a forward, which gives its token back."""
        ...


class CurrentWeights:
    """Synchronous schedules: the module's own parameters; gradients accumulate in ``p.grad``."""

    def forward(self, step: Callable[[], Any]) -> tuple[Any, None]:
        return step(), None

    def backward(self, token: None) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class Version:
    """One version of the weights.

    Attributes:
        updates: the number of updates that made it.
        leaves: by parameter name, what forwards of this version read. Gradients gather in the leaves' ``grad``.
        in_flight: forwards whose backward is still to come.
    """

    updates: int
    leaves: dict[str, Tensor]
    in_flight: int = 0


class WeightVersions:
    """Weight stashing (PipeDream, SOSP 2019) or none.

    Args:
        module: the partitioned module. Its parameters are swapped for leaves while a step runs.
        parameters: this stage's parameters, by name.
        stashing: ``"stash"``: a backward uses the weights of its forward. ``"latest"``: the current ones, for the
            products with weights, while activations are those of the forward; no copies, a biased gradient.
        grown: called with the name of a parameter whenever a backward has added to its :meth:`gradient`.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        stashing: Stashing = "stash",
        grown: Callable[[str], None] | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._grown = grown
        self._stashing = stashing
        self._updates = 0
        self._current: Version | None = None
        self._old: list[Version] = []  # older versions with microbatches in flight, or with gradients to be taken
        names = {id(parameter): name for name, parameter in parameters.items()}
        # Every place in the module tree where a parameter of this stage is read from, tied names included.
        self._slots = [
            (submodule._parameters, key, names[id(parameter)])
            for submodule in module.modules()
            for key, parameter in submodule._parameters.items()
            if id(parameter) in names
        ]

    @property
    def updates(self) -> int:
        """Updates done, which is also the number of the version that the next forward uses."""
        return self._updates

    def copies(self) -> int:
        """Versions held beside the current weights. One can be needed for each update in flight."""
        return sum(version.in_flight > 0 for version in self._old) if self._stashing == "stash" else 0

    def forward(self, step: Callable[[], Any]) -> tuple[Any, Version]:
        version = self._version()
        with self._read_from(version):
            result = step()
        version.in_flight += 1
        return result, version

    @contextmanager
    def backward(self, version: Version) -> Iterator[None]:
        # Activation checkpointing runs parts of the forward again here, and has to find the same weights.
        with self._read_from(version):
            yield
        version.in_flight -= 1

    @contextmanager
    def _read_from(self, version: Version) -> Iterator[None]:
        before = [store[key] for store, key, _ in self._slots]
        for store, key, name in self._slots:
            store[key] = version.leaves[name]  # type: ignore[assignment]  # torch.func does the same
        try:
            yield
        finally:
            for (store, key, _), parameter in zip(self._slots, before, strict=True):
                store[key] = parameter

    def gradient(self, name: str) -> Tensor:
        """What has gathered for a parameter so far, over all versions. It must have some."""
        versions = (*self._old, *([self._current] if self._current else []))
        parts = [g for version in versions if (g := version.leaves[name].grad) is not None]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients gathered since the last call, summed over versions, by parameter name. Where the loss didn't
        depend on a parameter, it is missing."""
        gradients: dict[str, Tensor] = {}
        for version in (*self._old, *([self._current] if self._current else [])):
            for name, leaf in version.leaves.items():
                if leaf.grad is not None:
                    gradients[name] = gradients[name].add_(leaf.grad) if name in gradients else leaf.grad
                    leaf.grad = None
        self._old = [version for version in self._old if version.in_flight]
        return gradients

    def update(self, apply: Callable[[], None]) -> None:
        """Let ``apply`` change the parameters in place, as optimizers do; versions in flight stay whole."""
        current = self._current
        if current is not None and current.in_flight:
            if self._stashing == "stash":
                for parameter in self._parameters.values():
                    if parameter.requires_grad:
                        parameter.data = parameter.data.clone()
            self._old.append(current)
        self._current = None
        apply()
        self._updates += 1

    def refresh(self) -> None:
        """Nothing is in flight, and others may have changed the parameters: the next forward looks at them anew.
        Gradients of an update under way (accumulation over batches) are kept for it."""
        versions = (*self._old, *([self._current] if self._current else []))
        assert not any(version.in_flight for version in versions)
        self._old = [v for v in versions if any(leaf.grad is not None for leaf in v.leaves.values())]
        self._current = None

    def _tell(self, name: str, leaf: Tensor) -> None:
        assert self._grown is not None
        self._grown(name)

    def _version(self) -> Version:
        if self._current is None:
            # `.data` first: its version counter is its own, so that an in-place step doesn't invalidate graphs that
            # "latest" means to run on the new values.
            leaves = {
                name: parameter.data.detach().requires_grad_(parameter.requires_grad)
                for name, parameter in self._parameters.items()
            }
            self._current = Version(self._updates, leaves)
            for name, leaf in leaves.items() if self._grown is not None else ():
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(partial(self._tell, name))
        return self._current


def swap_gradients(
    parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Set every ``p.grad`` to what ``gradients`` holds (None if absent); return what was there. Nothing is copied."""
    before: dict[str, Tensor | None] = {}
    for name, parameter in parameters.items():
        before[name] = parameter.grad
        parameter.grad = gradients.get(name)
    return before
