"""Sharding a model in place, as a plan says: layers are replaced by their parallel counterparts.

Everything is checked, and every new layer made, before the first one is put in its place: a plan that is refused
leaves the model as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_parallel.tensor.plan import Plan, Rule, resolve
from lightning_parallel.tensor.random import ShardedRegion
from lightning_parallel.tensor.sequence import Chain, find_chains
from lightning_parallel.tensor.shard import Shard
from lightning_parallel.tensor.siblings import Siblings

# What layers of these names project to, for errors.
_HEADS = {"q_proj": "query", "k_proj": "key-value", "v_proj": "key-value"}
# Under which names modules keep the size of a head, or how many there are.
_HEAD_SIZES = ("head_dim", "head_size")
_HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Sharding:
    """What a rank holds of a sharded model's parameters.

    Attributes:
        shards: how the sharded ones were cut, by full name; of tied parameters, by each name.
        partial: names of parameters that are whole on every rank, but get a part of their gradient on each: it has to
            be summed over the tensor group after a backward. Each parameter once, under its first name.
    """

    shards: dict[str, Shard]
    partial: tuple[str, ...]


def shard_module(
    module: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    region: ShardedRegion | None = None,
) -> Sharding:
    """Replace layers of ``module`` by this rank's share of them, wherever they are registered.

    Args:
        module: the model, equal on all ranks of the group. Its parameters are new objects afterwards: make optimizers
            later.
        plan: see :mod:`~lightning_parallel.tensor.plan`.
        group: the tensor group.
        sequence_parallel: also divide, along the sequence, what is between the sharded regions of the model's blocks;
            see :mod:`~lightning_parallel.tensor.sequence`.
        region: of the random numbers drawn where ranks compute different things.

    Raises:
        ValueError: the plan doesn't fit the model, or the model the group's size.
        RuntimeError: it has been sharded before.
    """
    rules = resolve(module, plan)
    chains = find_chains(module, rules) if sequence_parallel else []
    _check_ties(module, rules)
    for rule in rules:
        _check_heads(module, rule, rules, group.size())
    layers = _new_layers(rules, chains, group, region)
    partial = _partial(module, rules, chains)  # of names, which stay

    for rule, layer in layers:
        for name in rule.names:
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, layer)
    for rule in rules:
        for attribute in rule.style.attributes:
            setattr(rule.module, attribute, getattr(rule.module, attribute) // group.size())
    for chain in chains:
        chain.wrap(group, region)
    return Sharding(shards_of(module), partial)


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """How the parameters of the parallel layers in ``module`` are cut: also of those that a user put there."""
    return {
        f"{name}.{parameter}" if name else parameter: shard
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, ParallelLayer)
        for parameter, shard in layer.shards.items()
    }


def _new_layers(
    rules: list[Rule], chains: list[Chain], group: dist.ProcessGroup, region: ShardedRegion | None
) -> list[tuple[Rule, nn.Module]]:
    shared: dict[int, nn.Parameter] = {}
    layers: list[tuple[Rule, nn.Module]] = []
    siblings = _siblings(rules)
    for rule in rules:
        # In a sequence-parallel block the block as a whole is the region.
        inside = any(chain.holds(rule) for chain in chains)
        own_region = None if inside else region
        kind, whole = rule.style.kind, rule.module
        layer: nn.Module
        try:
            if kind in ("column", "column_gather"):
                gather = kind == "column_gather"
                layer = ColumnParallelLinear.from_linear(
                    whole, group=group, gather_output=gather, parts=_parts(rule), copy_input=not inside,
                    region=own_region, siblings=siblings.get(rule.name.rpartition(".")[0]), shared=shared,
                )  # fmt: skip
            elif kind in ("row", "row_split"):
                layer = RowParallelLinear.from_linear(
                    whole, group=group, input_is_parallel=kind == "row", sequence_dim=1 if inside else None,
                    region=own_region, shared=shared,
                )  # fmt: skip
            elif kind == "embedding":
                assert isinstance(whole, nn.Embedding)
                layer = VocabParallelEmbedding.from_embedding(whole, group=group, shared=shared)
            else:
                continue
        except ValueError as error:
            raise ValueError(f"plan: {rule.pattern!r}: {rule.name!r}: {error}") from None
        layers.append((rule, layer))
    return layers


def _siblings(rules: list[Rule]) -> dict[str, Siblings]:
    """By the name of their parent: column layers that hang on one module, which mostly gives them one input."""
    counts = Counter(rule.name.rpartition(".")[0] for rule in rules if rule.style.kind.startswith("column"))
    return {parent: Siblings(count) for parent, count in counts.items() if count > 1}


def _parts(rule: Rule) -> tuple[int, ...]:
    """Sizes of the fused parts of a column layer; none if it isn't fused."""
    parts = rule.style.parts
    if len(parts) != 1:
        return parts
    size, (count,) = _outputs(rule.module), parts
    if size % count:
        raise ValueError(f"{size} output features aren't {count} equal parts: give their sizes, as in 'column:8,4,4'.")
    return (size // count,) * count


def _outputs(linear: nn.Module) -> int:
    return int(linear.out_features if isinstance(linear, nn.Linear) else linear.nf)  # type: ignore[arg-type]


# -- checks ------------------------------------------------------------------------------------------------------


def _check_ties(module: nn.Module, rules: list[Rule]) -> None:
    """A parameter that has a name in a sharded layer may have none outside of them."""
    sharded = {id(rule.module): rule for rule in rules if rule.style.kind not in ("divide", "sum_gradient")}
    taken = {
        id(parameter): f"{rule.name}.{name}"
        for rule in sharded.values()
        for name, parameter in rule.module.named_parameters(recurse=False)
        if name == "weight" or not rule.style.kind.startswith("row")  # a row layer's bias stays as it is
    }
    for name, submodule in module.named_modules():
        if id(submodule) in sharded:
            continue
        for own, parameter in submodule.named_parameters(recurse=False):
            if id(parameter) in taken:
                whole = f"{name}.{own}" if name else own
                raise ValueError(
                    f"plan: {taken[id(parameter)]!r} is sharded, but it is the same parameter as {whole!r}, which "
                    f"the plan leaves whole: add a rule for {name!r} ('embedding' and 'column_gather' go together)."
                )


def _check_heads(module: nn.Module, rule: Rule, rules: list[Rule], count: int) -> None:
    """Heads aren't cut: each is on one rank."""
    over = f"which can't be shared out over {count} tensor ranks"
    for attribute in rule.style.attributes:
        if getattr(rule.module, attribute) % count:
            raise ValueError(f"{rule.name!r} has {attribute}={getattr(rule.module, attribute)}, {over}.")
    if rule.style.kind != "column":
        return
    for name in rule.names:
        parent_name, _, own = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        sizes = list(_integers(parent, _HEAD_SIZES))
        for _, head in sizes:
            for part in _parts_or_whole(rule):
                if part % head == 0 and (part // head) % count:
                    kind = _HEADS.get(own, "attention")
                    raise ValueError(f"{name!r} has {part // head} {kind} heads (of {head}), {over}.")
        counts = dict(_integers(parent, _HEAD_COUNTS))
        divided = any(other.style.attributes for other in rules if other.module is parent)
        if counts and parent_name and not sizes and not divided and count > 1:
            # x.view(..., num_heads, -1) would go on without an error, and mix the heads.
            kept = ", ".join(f"{attribute}={value}" for attribute, value in counts.items())
            raise ValueError(
                f"plan: {name!r} is divided over {count} ranks, but {parent_name!r} keeps {kept}: add "
                f"{parent_name!r}: 'divide:{','.join(counts)}' to the plan."
            )


def _parts_or_whole(rule: Rule) -> tuple[int, ...]:
    try:
        return _parts(rule) or (_outputs(rule.module),)
    except ValueError as error:
        raise ValueError(f"plan: {rule.pattern!r}: {rule.name!r}: {error}") from None


def _integers(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = vars(module).get(name)
        if type(value) is int and value > 0:
            yield name, value


def _partial(module: nn.Module, rules: list[Rule], chains: list[Chain]) -> tuple[str, ...]:
    sharded: set[int] = set()
    summed: set[int] = set()
    for rule in rules:
        parameters = list(rule.module.named_parameters())
        if rule.style.kind == "sum_gradient":
            summed.update(id(parameter) for _, parameter in parameters)
        elif rule.style.kind != "divide":
            row = rule.style.kind.startswith("row")
            sharded.update(id(parameter) for name, parameter in parameters if not (row and name == "bias"))
    for chain in chains:
        summed.update(id(parameter) for parameter in chain.parameters())
    return tuple(name for name, p in module.named_parameters() if id(p) in summed - sharded)
