"""The styles by which modules are divided over the tensor ranks::

    name in a plan              what it does
    column                      divides the weight by output features; the output stays divided
    column:3                    the same for three equal projections fused in one weight, such as qkv
    column:512,128,128          for fused projections of these sizes
    column_gather               gathers the output: every rank has all of it
    row                         divides the weight by input features; takes what a column layer left divided
    row_split                   takes all features, of which each rank uses its own
    embedding                   divides an embedding's table by ids
    divide:num_heads,num_kv     not a layer: a module whose integers of these names are shared out over the ranks
    sum_gradient                stays whole, but works on divided values: each rank has a part of its gradients

A style that is listed in :data:`STYLES` can be named in a plan.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self

from torch import nn

from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, is_linear
from lightning_parallel.tensor.style import Rule, Site, Style

# -- linear layers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Style):
    """Divides a linear layer by output features.

    Args:
        parts: the sizes of the projections fused in the weight; one number is how many equal ones there are.
    """

    parts: tuple[int, ...] = ()

    name = "column"
    shares_input = True
    leaves_divided = True
    in_sequence_blocks = True
    _gathers: ClassVar[bool] = False

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"|[1-9]\d*(,[1-9]\d*)*", options):
            raise ValueError("Write 'column:3' (equal parts) or 'column:512,128,128' (the sizes of the parts).")
        return cls(tuple(int(size) for size in options.split(",") if size))

    @property
    def text(self) -> str:
        return self.name + (f":{','.join(map(str, self.parts))}" if self.parts else "")

    def check(self, rule: Rule) -> None:
        _check_linear(rule)

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        """Refuse to cut a head in two: each head must be on one rank."""
        for name in rule.names:
            parent_name, _, own = name.rpartition(".")
            parent = root.get_submodule(parent_name)
            sizes = list(_integers(parent, _HEAD_SIZES))
            for _, head in sizes:
                for part in self.part_sizes(rule.module) or (_outputs(rule.module),):
                    if part % head == 0 and (part // head) % count:
                        kind = _HEADS.get(own, "attention")
                        raise ValueError(f"{name!r} has {part // head} {kind} heads (of {head}), {_over(count)}.")
            counts = dict(_integers(parent, _HEAD_COUNTS))
            divided = any(isinstance(other.style, Divide) for other in rules if other.module is parent)
            if counts and parent_name and not sizes and not divided and count > 1:
                # x.view(..., num_heads, -1) would go on without an error, and mix the heads.
                kept = ", ".join(f"{attribute}={value}" for attribute, value in counts.items())
                raise ValueError(
                    f"plan: {name!r} is divided over {count} ranks, but {parent_name!r} keeps {kept}: add "
                    f"{parent_name!r}: 'divide:{','.join(counts)}' to the plan."
                )

    def part_sizes(self, linear: nn.Module) -> tuple[int, ...]:
        """The sizes of a layer's fused parts; none if it isn't fused."""
        if len(self.parts) != 1:
            return self.parts
        size, (count,) = _outputs(linear), self.parts
        if size % count:
            raise ValueError(
                f"{size} output features aren't {count} equal parts: give their sizes, as in 'column:8,4,4'."
            )
        return (size // count,) * count

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return ColumnParallelLinear.from_linear(
            rule.module,
            group=site.group,
            gather_output=self._gathers,
            parts=self.part_sizes(rule.module),
            copy_input=not site.in_block,
            region=site.region,
            siblings=site.siblings,
            shared=site.shared,
        )

    def divided_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return dict(module.named_parameters(recurse=False))


class GatheredColumn(Column):
    """Divides a linear layer by output features, and gathers the output."""

    name = "column_gather"
    leaves_divided = False
    is_alone = True
    in_sequence_blocks = False
    _gathers = True

    @classmethod
    def read(cls, options: str) -> Self:
        if options:
            raise ValueError("Gathered parts would be in another order than the layer's: use one layer for each part.")
        return cls()

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        """What is gathered has all heads."""


class Row(Style):
    """Divides a linear layer by input features, which come divided."""

    name = "row"
    takes_divided = True
    in_sequence_blocks = True
    _input_is_parallel: ClassVar[bool] = True

    def check(self, rule: Rule) -> None:
        _check_linear(rule)

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return RowParallelLinear.from_linear(
            rule.module,
            group=site.group,
            input_is_parallel=self._input_is_parallel,
            sequence_dim=1 if site.in_block else None,
            region=site.region,
            shared=site.shared,
        )

    def divided_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        # The bias stays whole.
        return {name: each for name, each in module.named_parameters(recurse=False) if name == "weight"}


class SplitRow(Row):
    """Divides a linear layer by input features, of which each rank takes its own."""

    name = "row_split"
    takes_divided = False
    in_sequence_blocks = False
    _input_is_parallel = False


# -- other modules -----------------------------------------------------------------------------------------------


class Embedding(Style):
    """Divides an embedding's table by ids."""

    name = "embedding"
    is_alone = True

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, nn.Embedding):
            raise ValueError(rule.misfit(": it is for nn.Embedding."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return VocabParallelEmbedding.from_embedding(rule.module, group=site.group, shared=site.shared)

    def divided_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return dict(module.named_parameters(recurse=False))


@dataclass(frozen=True)
class Divide(Style):
    """Shares out integers that a module keeps, such as its number of heads.

    Args:
        attributes: their names.
    """

    attributes: tuple[str, ...] = ()

    name = "divide"
    in_sequence_blocks = True

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"\w+(,\w+)*", options):
            raise ValueError("Write 'divide:num_heads' or 'divide:num_heads,num_kv' (names of attributes).")
        return cls(tuple(options.split(",")))

    @property
    def text(self) -> str:
        return f"{self.name}:{','.join(self.attributes)}"

    def check(self, rule: Rule) -> None:
        for attribute in self.attributes:
            value = getattr(rule.module, attribute, None)
            if not isinstance(value, int) or isinstance(value, bool):
                integers = ", ".join(repr(k) for k, v in vars(rule.module).items() if type(v) is int) or "none"
                raise ValueError(rule.misfit(f" without an integer {attribute!r}. It has {integers}."))

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        for attribute in self.attributes:
            if getattr(rule.module, attribute) % count:
                raise ValueError(f"{rule.name!r} has {attribute}={getattr(rule.module, attribute)}, {_over(count)}.")

    def divide_in_place(self, module: nn.Module, count: int) -> None:
        for attribute in self.attributes:
            setattr(module, attribute, getattr(module, attribute) // count)


class SumGradient(Style):
    """Keeps a module whole that works on divided values, such as a norm of each head."""

    name = "sum_gradient"
    in_sequence_blocks = True

    def check(self, rule: Rule) -> None:
        if not any(True for _ in rule.module.parameters()):
            raise ValueError(rule.misfit(", which has no parameters."))

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


STYLES: Mapping[str, type[Style]] = MappingProxyType(
    {style.name: style for style in (Column, GatheredColumn, Row, SplitRow, Embedding, Divide, SumGradient)}
)


def read_style(style: str | Style, other_names: Mapping[str, str] = MappingProxyType({})) -> Style:
    """The style that a plan names; an object is taken as it is.

    Args:
        style: such as "column:3".
        other_names: names that aren't styles here, with the style that computes the same, for the error.

    Raises:
        ValueError: there is no such style, or its options can't be read.
    """
    if isinstance(style, Style):
        return style
    name, _, options = style.partition(":")
    if name not in STYLES:
        close = difflib.get_close_matches(other_names.get(name, name), STYLES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown style {style!r}: {hint}There are {', '.join(STYLES)}.")
    try:
        return STYLES[name].read(options)
    except ValueError as error:
        raise ValueError(f"style {style!r} can't be read. {error}") from None


# -- what styles ask of modules ----------------------------------------------------------------------------------

# What layers of these names project to, for errors.
_HEADS = {"q_proj": "query", "k_proj": "key-value", "v_proj": "key-value"}
# Under which names modules keep the size of a head, or how many there are.
_HEAD_SIZES = ("head_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_kv_heads", "num_key_value_heads")


def _over(count: int) -> str:
    return f"which can't be shared out over {count} tensor ranks"


def _outputs(linear: nn.Module) -> int:
    return int(linear.out_features if isinstance(linear, nn.Linear) else linear.nf)  # type: ignore[arg-type]


def _integers(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = vars(module).get(name)
        if type(value) is int and value > 0:
            yield name, value


def _check_linear(rule: Rule) -> None:
    if isinstance(rule.module, ParallelLayer):
        raise RuntimeError(rule.misfit(": it is divided already."))
    if not is_linear(rule.module):
        raise ValueError(rule.misfit(": it is for nn.Linear and transformers' Conv1D."))
