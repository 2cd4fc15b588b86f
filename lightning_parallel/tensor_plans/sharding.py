"""Dividing a model in place, as a plan says: layers become their parallel counterparts.

They stay the same objects, with the user's attributes, so whoever holds one (a list, a wrapper) holds the divided one.
Everything is checked, and every parallel counterpart made, before the first layer changes. So a plan that is refused
leaves the model as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor.layer import ParallelLayer, Siblings, Site
from lightning_parallel.tensor_plans.rules import resolve, with_few_heads
from lightning_parallel.tensor_plans.sequence import find_chains
from lightning_parallel.tensor_plans.style import Plan, Rule
from lightning_parallel.tensor_plans.styles import Column, SharedHeads


@dataclass(frozen=True)
class Sharding:
    """What a rank holds of a divided model's parameters.

    Attributes:
        shards: how the divided parameters were cut, by full name; a tied parameter is there under each of its names.
        partial: the first names of parameters that are whole on every rank, but of whose gradient each rank computes a
            part. The parts have to be summed over the tensor group after a backward.
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
    """Make layers of ``module``, which is equal on all ranks, this rank's shards of them. Parameters are new objects
    afterwards, so make optimizers later.

    Args:
        sequence_parallel: divide the activations between the divided layers along the sequence.
        region: where the ranks compute different things, and draw different random numbers.

    Raises:
        ValueError: the plan doesn't fit the model, or the model doesn't fit the size of the group.
        RuntimeError: the model has been divided before.
    """
    rules = with_few_heads(module, resolve(module, plan), group.size())
    chains = find_chains(module, rules) if sequence_parallel else []
    for rule in rules:
        with _named_in_errors(rule):
            rule.style.check_division(rule, module, rules, group.size())
    layers: list[tuple[Rule, nn.Module]] = []
    counts = Counter(_parent(rule) for rule in rules if isinstance(rule.style, Column | SharedHeads))
    siblings = {parent: Siblings(count) for parent, count in counts.items() if count > 1}
    for rule in rules:
        # A block that works on pieces of the sequence is one region as a whole.
        in_block = any(chain.holds(rule) for chain in chains)
        site = Site(group, None if in_block else region, in_block, siblings.get(_parent(rule)))
        with _named_in_errors(rule):
            layer = rule.style.new_layer(rule, site)
        if layer is not None:
            layers.append((rule, layer))
    divided = _tied(module, layers)
    summed = {id(p) for rule in rules for p in rule.style.partial_parameters(rule.module)}
    summed |= {id(p) for chain in chains for p in chain.parameters()}
    partial = tuple(name for name, p in module.named_parameters() if id(p) in summed and name not in divided)

    for rule, layer in layers:
        kind, own = type(layer), type(rule.module)
        # A subclass of the user's keeps its methods, and `isinstance` holds.
        rule.module.__class__ = kind if issubclass(kind, own) else type(kind.__name__, (kind, own), {})
        vars(rule.module).update(vars(layer))
    for rule in rules:
        rule.style.divide_in_place(rule, group.size())
    for chain in chains:
        chain.wrap(Site(group, region))
    for part in module.modules():
        # In evaluation torch's own layers run as one operation, on the weights: without their layers' forwards.
        if isinstance(part, nn.TransformerEncoderLayer) and _has_shards(part):
            part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder) and _has_shards(part):
            part.use_nested_tensor = False
    shards = {
        f"{name}.{parameter}" if name else parameter: shard
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, ParallelLayer)  # also one that a user put there
        for parameter, shard in layer.shards.items()
    }
    return Sharding(shards, partial)


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(inner, ParallelLayer) for inner in module.modules())


def _parent(rule: Rule) -> str:
    is_base = rule.wrapper == ".base_layer"  # the other layers of an adapter get inputs of their own
    return (rule.called_names[0] if is_base else rule.name).rpartition(".")[0]


@contextmanager
def _named_in_errors(rule: Rule) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        text = str(error)
        if text.startswith("plan: "):
            raise
        named = "" if repr(rule.name) in text else f"{rule.name!r}: "
        raise ValueError(f"plan: {rule.pattern!r}: {named}{text}") from None


def _tied(module: nn.Module, layers: Sequence[tuple[Rule, nn.Module]]) -> set[str]:
    """The names of the divided parameters. Layers whose parameters are tied share one shard from now on.

    Raises:
        ValueError: a tied parameter is divided in two ways, or has a name outside of all divided layers.
    """
    shards: dict[int, tuple[str, Shard, nn.Parameter]] = {}  # the first one of each whole parameter, by its id
    divided: set[str] = set()
    for rule, layer in layers:
        for name, shard in layer.shards.items() if isinstance(layer, ParallelLayer) else ():
            names = [f"{each}.{name}" for each in rule.names]
            own = names[0], shard, getattr(layer, name)
            _, first, parameter = shards.setdefault(id(getattr(rule.module, name)), own)
            if first != shard:
                with _named_in_errors(rule):
                    raise ValueError(
                        f"A tied parameter of shape {shard.shape} can't be divided in two ways: along dimension "
                        f"{first.dim} in parts of {first.parts}, and along {shard.dim} in parts of {shard.parts}. Give "
                        f"the layers that share it styles that agree, or untie them."
                    )
            layer.register_parameter(name, parameter)
            divided.update(names)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in shards and name not in divided:
            raise ValueError(
                f"plan: {shards[id(parameter)][0]!r} is divided, but it is the same parameter as {name!r}, which the "
                f"plan leaves whole: add a rule for {name.rpartition('.')[0]!r} ('embedding' and 'column_gather' go "
                f"together)."
            )
    return divided
