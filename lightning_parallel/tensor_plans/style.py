"""A style: how one module is divided over the tensor ranks.

A new style is a subclass of :class:`Style`, and a plan takes an instance of it. Those that plans name stand in
``styles.py`` and ``around.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from lightning_parallel.tensor.layer import Site


@dataclass(frozen=True)
class Rule:
    """One module with its style.

    Attributes:
        module: the module to be divided.
        names: all names under which it is registered.
        pattern: the pattern of the plan that matched it.
        text: the style as the plan writes it.
        style: how it is divided.
        wrapper: the end of the module's name, such as ``.base_layer``, that the model's code leaves out because it
            calls a module around it; empty if nothing wraps the module.
    """

    module: nn.Module
    names: tuple[str, ...]
    pattern: str
    text: str
    style: Style
    wrapper: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def called_names(self) -> tuple[str, ...]:
        """The names that the model's code calls the module by: its own, or those of a module that wraps it."""
        return tuple(name.removesuffix(self.wrapper) for name in self.names)

    def misfit(self, what: str) -> str:
        """A message that says the style doesn't fit the module."""
        return f"plan: {self.pattern!r}: {self.text!r}, but {self.name!r} is a {type(self.module).__name__}{what}"


class Style:
    """How a module is divided. By default the module stays as it is; override what differs.

    Attributes:
        name: the style's name in plans, before the colon.
        leaves_divided: the output is divided over the ranks, so the next layer has to take divided input. Under LoRA,
            ``lora_B`` gets the style too.
        takes_divided: the input is what a style with ``leaves_divided`` returned. Under LoRA, ``lora_A`` gets the style
            too.
        is_alone: input and output are whole, so the style can be left out of a plan without breaking a pair.
        in_sequence_blocks: the style works where activations are divided along the sequence.
        sums_gradients: all parameters stay whole, and each rank computes a part of their gradients.
    """

    name: ClassVar[str] = ""
    leaves_divided: ClassVar[bool] = False
    takes_divided: ClassVar[bool] = False
    is_alone: ClassVar[bool] = False
    in_sequence_blocks: ClassVar[bool] = False
    sums_gradients: ClassVar[bool] = False

    @classmethod
    def read(cls, options: str) -> Self:
        """The style with the options that a plan writes after the colon.

        Raises:
            ValueError: it can't be read.
        """
        if options:
            raise ValueError(f"{cls.name!r} takes no options.")
        return cls()

    def check(self, rule: Rule) -> None:
        """Raise a ValueError if the style doesn't fit the module."""

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        """Raise a ValueError if the module can't be divided over ``count`` ranks. ``root`` is the whole model, and
        ``rules`` are the rules of all its modules."""

    def new_layer(self, rule: Rule, site: Site) -> nn.Module | None:
        """A layer with this rank's shard of the module, which takes its class and content; None if the module stays.
        One that holds shards is a :class:`.ParallelLayer`, and the names in its ``shards`` are those of the module's
        parameters that are divided. Others would be saved as whole parameters."""
        return None

    def divide_in_place(self, rule: Rule, count: int) -> None:
        """Change a module that stays, when everything has been checked and the layers have been divided."""

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that stay whole, of whose gradient each rank computes a part. The parts are summed."""
        return list(module.parameters()) if self.sums_gradients else []


Plan = Mapping[str, str | Style]  # patterns of module names, to styles


def over(count: int) -> str:
    """The end of an error about something that can't be shared out over ``count`` ranks."""
    return f"which can't be shared out over {count} tensor ranks"
