"""Uses of attributes are told, and nobody else notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.tracing.plain_values import attribute_uses


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0
        self.last: float | None = None
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = 2.0
        self.total += 1
        return self.layer(x)


def test_reads_and_assignments_are_told_in_their_order() -> None:
    module, told = Counts(), []
    with attribute_uses({module: {"calls", "total"}}, lambda part, name, assigned: told.append((part, name, assigned))):
        assert isinstance(module, Counts) and type(module).__name__ == "Counts"
        module(torch.ones(1, 2))
    uses = {kind: [assigned for _, name, assigned in told if name == kind] for kind in ("calls", "total")}
    assert uses["calls"] == [False, True] and uses["total"][:2] == [False, True]  # torch itself reads a buffer again
    assert all(part is module for part, _, _ in told)
    assert type(module) is Counts and module.calls == 1 and module.last == 2.0 and module.total == 1


def test_the_class_is_given_back_after_an_error() -> None:
    module = Counts()
    with pytest.raises(KeyError), attribute_uses({module: {"calls"}}, lambda *_: None):
        raise KeyError
    assert type(module) is Counts


class Registered(nn.Module):
    """Its class wants to know of each subclass."""

    known: list[str] = []

    def __init_subclass__(cls, *, tag: str, **kwargs: object) -> None:
        Registered.known.append(tag)


class Final(type):
    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, object]) -> Final:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("a final class")
        return super().__new__(cls, name, bases, names)


class Finished(nn.Module, metaclass=Final):
    pass


class Slots(nn.Module):
    __slots__ = ("extra",)


@pytest.mark.parametrize("kind", [Registered, Finished, Slots])
def test_classes_do_not_notice_and_keep_their_super(kind: type[nn.Module]) -> None:
    module, told = kind(), []
    module.value = 1
    with attribute_uses({module: {"value"}}, lambda part, name, assigned: told.append(assigned)):
        assert module.value == 1 and isinstance(module, kind)
        module.value = 2
    assert told == [False, True] and type(module) is kind and Registered.known == []
