"""Styles of linear layers, embeddings and what lies between them, and the names of all styles in plans.
``docs/tensor-plans.md`` explains each; those in ``around.py`` are for modules of any class."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from torch import nn

from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, is_linear
from lightning_parallel.tensor_plans.around import Copy, Experts, Parameters, Work, around
from lightning_parallel.tensor_plans.style import Rule, Style, over

# -- linear layers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Style):
    """Divides a linear layer by output features.

    Args:
        parts: the sizes of the projections fused in the weight. One number is the number of equal ones; none: it isn't
            fused.
    """

    parts: tuple[int, ...] = ()

    name = "column"
    leaves_divided = True
    in_sequence_blocks = True

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"|[1-9]\d*(,[1-9]\d*)*", options):
            raise ValueError("Write 'column:3' (equal parts) or 'column:512,128,128' (the sizes of the parts).")
        return cls(tuple(int(size) for size in options.split(",") if size))

    def check(self, rule: Rule) -> None:
        _check_linear(rule)

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        """Refuse to cut a head in two: each head must be on one rank."""
        for name in rule.called_names if self.leaves_divided else ():  # a gathered output has all heads
            parent_name, _, own = name.rpartition(".")
            parent = root.get_submodule(parent_name)
            if "qk_head_dim" in vars(parent):  # DeepSeek's attention, whose keys and values differ in size
                for attribute, heads in _integers(parent, ("num_heads",)):
                    if heads % count:
                        raise ValueError(f"{parent_name!r} has {attribute}={heads}, {over(count)}.")
                continue
            sizes = list(_integers(parent, _HEAD_SIZES))
            for _, head in sizes:
                for part in self.part_sizes(rule.module) or (_outputs(rule.module),):
                    if part % head == 0 and (part // head) % count:
                        kind = _HEADS.get(own, "attention")
                        raise ValueError(f"{name!r} has {part // head} {kind} heads (of {head}), {over(count)}.")
            counts = dict(_integers(parent, HEAD_COUNTS))
            divided = any(isinstance(other.style, Divide) for other in rules if other.module is parent)
            if counts and parent_name and not sizes and not divided and count > 1:
                # x.view(..., num_heads, -1) would go on without an error, and mix the heads.
                kept = ", ".join(f"{attribute}={value}" for attribute, value in counts.items())
                raise ValueError(
                    f"plan: {name!r} is divided over {count} ranks, but {parent_name!r} keeps {kept}: add "
                    f"{parent_name!r}: 'divide:{','.join(counts)}' to the plan."
                )

    def part_sizes(self, linear: nn.Module) -> tuple[int, ...]:
        """The sizes of a layer's fused parts; empty if it isn't fused."""
        if len(self.parts) != 1:
            return self.parts
        size, (count,) = _outputs(linear), self.parts
        if size % count:
            raise ValueError(
                f"{size} output features aren't {count} equal parts: give their sizes, as in 'column:8,4,4'."
            )
        return (size // count,) * count

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return ColumnParallelLinear(rule.module, site, self.part_sizes(rule.module), not self.leaves_divided)


class GatheredColumn(Column):
    """Divides a linear layer by output features, and gathers the output."""

    name = "column_gather"
    leaves_divided = False
    is_alone = True
    in_sequence_blocks = False


@dataclass(frozen=True)
class SharedHeads(Style):
    """A projection to fewer heads than there are ranks (to ``heads``), as grouped-query attention may have. It stays
    whole, and each rank uses the one head that its queries need::

        8 query heads, 2 key-value heads, 4 ranks      rank       0      1      2      3
                                                       queries   0 1    2 3    4 5    6 7
                                                       key-value  0      0      1      1
    """

    heads: int = 1

    name = "heads"
    sums_gradients = True
    leaves_divided = True
    in_sequence_blocks = True

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"[1-9]\d*", options):
            raise ValueError("Write 'heads:2' (the number of heads that it projects to).")
        return cls(int(options))

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, nn.Linear) or rule.module.out_features % self.heads:
            raise ValueError(rule.misfit(f": it is for an nn.Linear with a multiple of {self.heads} outputs."))

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        if count % self.heads:
            raise ValueError(f"{rule.name!r} projects to {self.heads} heads, {over(count)}: use a multiple of them.")

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        width = _outputs(rule.module) // self.heads
        start = site.group.rank() * self.heads // site.group.size() * width
        this = object()  # stands for the layer, which doesn't refer to itself
        work = Work(lambda x, group: site.copied(x, this), lambda y, group: y.narrow(-1, start, width))
        return around(rule.module, site, work)


class Row(Style):
    """Divides a linear layer by input features, which come divided."""

    name = "row"
    takes_divided = True
    in_sequence_blocks = True

    def check(self, rule: Rule) -> None:
        _check_linear(rule)

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return RowParallelLinear(rule.module, site, self.takes_divided)


class SplitRow(Row):
    """Divides a linear layer by input features. Its input is whole; each rank takes its own features of it."""

    name = "row_split"
    takes_divided = False
    in_sequence_blocks = False


# -- embeddings, and integers ---------------------------------------------------------------------------------------


class Embedding(Style):
    """Divides an embedding's table by ids."""

    name = "embedding"
    is_alone = True

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, nn.Embedding):
            raise ValueError(rule.misfit(": it is for nn.Embedding."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return VocabParallelEmbedding(rule.module, site)


@dataclass(frozen=True)
class Divide(Style):
    """Shares out integers that a module keeps, such as its number of heads.

    Args:
        attributes: the names of the integers; ``"groups/2"`` is divided by 2, not by the number of ranks.
    """

    attributes: tuple[str, ...] = ()

    name = "divide"
    in_sequence_blocks = True

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"\w+(/[1-9]\d*)?(,\w+(/[1-9]\d*)?)*", options):
            raise ValueError("Write 'divide:num_heads' or 'divide:num_heads,num_kv/2' (names of attributes).")
        return cls(tuple(options.split(",")))

    def check(self, rule: Rule) -> None:
        for attribute in self._divisors(1):
            value = getattr(rule.module, attribute, None)
            if not isinstance(value, int) or isinstance(value, bool):
                integers = ", ".join(repr(k) for k, v in vars(rule.module).items() if type(v) is int) or "none"
                raise ValueError(rule.misfit(f" without an integer {attribute!r}. It has {integers}."))

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        for attribute, divisor in self._divisors(count).items():
            if getattr(rule.module, attribute) % divisor:
                raise ValueError(f"{rule.name!r} has {attribute}={getattr(rule.module, attribute)}, {over(count)}.")

    def divide_in_place(self, rule: Rule, count: int) -> None:
        for attribute, divisor in self._divisors(count).items():
            setattr(rule.module, attribute, getattr(rule.module, attribute) // divisor)

    def _divisors(self, count: int) -> dict[str, int]:
        pairs = (attribute.partition("/") for attribute in self.attributes)
        return {name: int(divisor or count) for name, _, divisor in pairs}


class SumGradient(Style):
    """Keeps a module whole that works on divided values, such as a norm of each head."""

    name = "sum_gradient"
    sums_gradients = True
    in_sequence_blocks = True

    def check(self, rule: Rule) -> None:
        if any(True for _ in rule.module.children()):  # those may work on whole values
            raise ValueError(rule.misfit(" with modules inside: name those that work on divided values."))


# -- what they ask of modules ------------------------------------------------------------------------------------

# What layers of these names project to, for errors.
_HEADS = {"q_proj": "query", "k_proj": "key-value", "v_proj": "key-value"}
# Under which names modules keep the size of a head, or how many there are.
_HEAD_SIZES = ("head_dim", "head_size")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_kv_heads", "num_key_value_heads")


def _outputs(linear: nn.Module) -> int:
    return int(linear.out_features if isinstance(linear, nn.Linear) else linear.nf)  # type: ignore[arg-type]


def _integers(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = vars(module).get(name)
        if type(value) is int and value > 0:
            yield name, value


def _check_linear(rule: Rule) -> None:
    if not is_linear(rule.module):
        raise ValueError(rule.misfit(": it is for nn.Linear and transformers' Conv1D."))


# -- their names in plans -------------------------------------------------------------------------------------------

STYLES: Mapping[str, type[Style]] = MappingProxyType(
    {
        style.name: style
        for style in (
            Column, GatheredColumn, Row, SplitRow, SharedHeads, Embedding, Divide, SumGradient, Experts, Parameters,
            Copy,
        )
    }
)  # fmt: skip

# Styles of transformers' plans (5.23) for whole modules, with those that compute the same.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "column",
        "packed_colwise": "column:2",
        "colwise_gather_output": "column_gather",
        "colwise_rep": "column_gather",  # its name before 5.0
        "rowwise": "row",
        "rowwise_split_input": "row_split",
        "rowwise_rep": "row_split",
        "embedding_rowwise": "embedding",
        "embedding_colwise": "embedding",
        "replicated_with_grad_allreduce": "sum_gradient",
    }
)


def read_style(style: str | Style) -> Style:
    """The style that a plan names, with its options as in ``"column:3"``; an object of a style is taken as it is.

    Raises:
        ValueError: there is no such style, or its options can't be read.
    """
    if isinstance(style, Style):
        return style
    name, _, options = style.partition(":")
    if name not in STYLES:
        close = difflib.get_close_matches(OTHER_NAMES.get(name, name), STYLES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown style {style!r}: {hint}There are {', '.join(STYLES)}.")
    try:
        return STYLES[name].read(options)
    except ValueError as error:
        raise ValueError(f"style {style!r} can't be read. {error}") from None
