"""From a module to stages: between which layers it may be cut, and who owns which parameter.

A model is seen as a chain of *layers*: submodules that run once each, in order, each on what the one before returned. A
stage owns a run of layers. Everything else that holds parameters is owned as follows:

- A module outside the chain is owned by the first stage if it was registered before the layers (embeddings), and by the
  last one if after (final norm, head). If it was registered between two layers (an encoder's final norm), it goes with
  the later one: a stage leaves the step right after its last layer, so the earlier layer's stage might never call it.
  If the source of ``forward`` shows that it is called after a layer, it goes with the layer after that one, wherever it
  was registered (``source_order.py``).
- A *loose* parameter hangs directly on a module around the chain (a position embedding made with ``nn.Parameter``, or a
  list of such). Every stage owns it, since only the first step shows where it is used. It is usually small.
- A parameter with several names (tied weights) is owned by every stage that owns one of the names.

::

    GPT:  embed            first stage      registered before the layers
          blocks.0 .. 5    two a stage      the chain
          norm, head       last stage       registered after the layers
          positions        every stage      loose

Modules without parameters run everywhere. Only names are decided here; ``stage.py`` acts on them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from torch import nn

from lightning_parallel.pipeline.balance import Balance, balanced, bounds_of
from lightning_parallel.pipeline.source_order import SourceOrder

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Partition:
    """Who owns what, by the names of the original module.

    Attributes:
        layers: the names of the chain's layers, in the order in which they run.
        bounds: stage s owns ``layers[bounds[s]:bounds[s + 1]]``; ``len(bounds) == stages + 1``.
        outside: the names of the modules outside the chain that hold parameters, with the stage that owns each.
        owners: for every parameter name, tied names included, the stages that hold the parameter.
        aliases: for every parameter name, the first name of the same parameter. Tied names share one.
        loose: the first names of the parameters that lie in no layer and in no module outside.
    """

    layers: tuple[str, ...]
    bounds: tuple[int, ...]
    outside: dict[str, int]
    owners: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    loose: frozenset[str]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def layers_of(self, stage: int) -> range:
        """The indices of the layers that ``stage`` owns."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def stage_of_modules(self) -> dict[str, int]:
        """The stage of each owned module: of each layer, and of each module outside."""
        stages = {self.layers[i]: stage for stage in range(self.stages) for i in self.layers_of(stage)}
        return stages | self.outside

    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters (by first name) that several stages hold, whose gradients must be summed over these stages."""
        return {name: self.owners[name] for name in dict.fromkeys(self.aliases.values()) if len(self.owners[name]) > 1}


def partition(
    module: nn.Module, stages: int, layers: Sequence[str] | None = None, balance: Balance = "parameters"
) -> Partition:
    """Cut ``module`` into ``stages``.

    Args:
        module: the whole model.
        stages: how many stages.
        layers: names or patterns of the layers, in running order. ``*`` stands for one part of a dotted name, as in
            ``"net.blocks.*"``. None: the children of the ``nn.Sequential`` or ``nn.ModuleList`` that can be cut most
            evenly.
        balance: ``"parameters"`` (the largest stage is as small as can be), ``"layers"`` (equal counts), or the number
            of layers of each stage.

    Raises:
        ValueError: no chain was found, a pattern matches nothing, there are more stages than layers, or a stage would
            have no trainable parameters.
    """
    chain = resolve_layers(module, layers, stages)
    if len(chain) < stages:
        raise ValueError(
            f"stages={stages}, but the model has only {len(chain)} layers to share out ({_enumerate(chain)}): use at "
            f"most {len(chain)} stages, or name finer layers with `layers`."
        )
    owned_modules = _outside(module, chain)
    tensors = dict(module.named_parameters(remove_duplicate=False))
    first_names: dict[int, str] = {}
    aliases = {name: first_names.setdefault(id(parameter), name) for name, parameter in tensors.items()}

    costs, trainable = _costs(module, chain, owned_modules)
    bounds = bounds_of(costs, trainable, stages, balance)

    stage_of_layer = [stage for stage in range(stages) for _ in range(bounds[stage], bounds[stage + 1])]
    outside = {name: stage_of_layer[position] for name, position in owned_modules.items()}
    roots = dict(zip(chain, stage_of_layer, strict=True)) | outside
    # By identity, since a module may have several names, of which one lies in a layer and one doesn't.
    places = {id(part): stage for name, stage in roots.items() for part in module.get_submodule(name).modules()}
    holders: dict[str, set[int]] = {}
    loose: set[str] = set()
    for name in tensors:
        stage = places.get(id(module.get_submodule(name.rpartition(".")[0])))
        if stage is None:
            loose.add(aliases[name])
        holders.setdefault(aliases[name], set()).update(range(stages) if stage is None else [stage])
    owners = {name: tuple(sorted(holders[aliases[name]])) for name in tensors}
    result = Partition(tuple(chain), tuple(bounds), outside, owners, aliases, frozenset(loose))
    _check_trainable(result, {n for n, p in tensors.items() if p.requires_grad})
    return result


def find_layers(module: nn.Module) -> list[str]:
    """The chain that a pipeline would be made of; empty if the model has none."""
    return _best_chain(module, 2) if _containers(module) else []


def resolve_layers(
    module: nn.Module, patterns: Sequence[str] | None, stages: int, setting: str = "layers"
) -> list[str]:
    """The names of the chain's layers: those that match the patterns, or the chain found.

    Args:
        module: the whole model.
        patterns: the setting's value.
        stages: how many stages the chain is for.
        setting: the setting's name, for errors.

    Raises:
        ValueError: a pattern matches nothing or what isn't called, or matches lie inside each other.
    """
    if patterns is None:
        return _best_chain(module, stages)
    if isinstance(patterns, str) or not patterns:
        raise ValueError(f"{setting}={patterns!r}: give a list of module names or patterns, such as ['net.blocks.*'].")
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    chain: list[str] = []
    taken: set[int] = set()
    for pattern in patterns:
        regex = re.compile(r"\.".join(re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")))
        matched = [name for name in names if regex.fullmatch(name)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3) or list(_containers(module))[:5] or names[:5]
            raise ValueError(f"{setting}: {pattern!r} matches no module. Did you mean {_enumerate(close)}?")
        for name in matched:
            if id(module.get_submodule(name)) not in taken:  # one module under two names is one layer
                taken.add(id(module.get_submodule(name)))
                chain.append(name)
    for name in chain:
        part = module.get_submodule(name)
        if isinstance(part, _NOT_CALLED) and type(part).forward is nn.Module.forward:
            kind = type(part).__name__
            raise ValueError(
                f"{setting}: {name!r} is a {kind}, which isn't called itself: name its modules, '{name}.*'."
            )
        nested = [other for other in chain if other.startswith(f"{name}.")]
        if nested:
            raise ValueError(f"{setting}: {nested[0]!r} is a part of {name!r}: name one of them, not both.")
    return chain


# -- the chain ---------------------------------------------------------------------------------------------------


def _containers(module: nn.Module) -> dict[str, nn.Sequential | nn.ModuleList]:
    return {
        name: container
        for name, container in module.named_modules()
        if isinstance(container, (nn.Sequential, nn.ModuleList))
        and len(container) > 1
        and not any(isinstance(child, _NOT_CALLED) for child in container)
    }


def _best_chain(module: nn.Module, stages: int) -> list[str]:
    """The children of that container, among the largest few, whose cut leaves the smallest largest stage.

    An outer ``nn.Sequential(embedding, encoder, head)`` holds more parameters than the encoder's list of blocks, but
    can't be shared out. ``nn.Sequential`` promises to run its children in order on one value, so one that is nested in
    another is opened up, and the cut may fall inside it.
    """
    chains = [
        (sum(p.numel() for p in container.parameters()), list(_opened(container, f"{name}." if name else "")))
        for name, container in _containers(module).items()
    ]
    if not chains:
        names = [name for name, _ in module.named_children()]
        if stages == 1:
            return names
        raise ValueError(
            f"No layers to share out over stages={stages}: the model has no nn.Sequential or nn.ModuleList of two or "
            f"more modules. Name its layers in running order with `layers`, e.g. layers={names[:3]}."
        )
    chains.sort(key=lambda chain: chain[0], reverse=True)
    long_enough = [layers for _, layers in chains if len(layers) >= stages][:8]
    if not long_enough:  # the error that follows names the longest
        return max((layers for _, layers in chains), key=len)
    return min(long_enough, key=lambda layers: _largest_stage(module, layers, stages))


def _largest_stage(module: nn.Module, chain: Sequence[str], stages: int) -> int:
    costs, trainable = _costs(module, chain, _outside(module, chain))
    bounds = balanced(costs, trainable, stages)
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def _costs(module: nn.Module, chain: Sequence[str], owned_modules: dict[str, int]) -> tuple[list[int], list[bool]]:
    """The parameters of each layer with those of the outside modules that go with it; and whether any is trainable."""
    costs = [0] * len(chain)
    trainable = [False] * len(chain)
    for name, position in (*((name, i) for i, name in enumerate(chain)), *owned_modules.items()):
        for parameter in module.get_submodule(name).parameters():
            costs[position] += parameter.numel()
            trainable[position] |= parameter.requires_grad
    return costs, trainable


def _opened(container: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in container.named_children():
        if _runs_in_order(container) and _runs_in_order(child):
            yield from _opened(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _runs_in_order(container: nn.Module) -> bool:
    as_documented = isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward
    return as_documented and len(list(container.children())) > 1


# -- outside the chain -------------------------------------------------------------------------------------------


def _outside(module: nn.Module, chain: Sequence[str]) -> dict[str, int]:
    """The modules outside the chain that hold parameters, each with the index of the layer that it goes with: the one
    after the last layer that is registered so far, or that is plainly called before it; or the last layer."""
    owned_modules: dict[str, int] = {}
    coming = 0  # the index of the layer after the last one passed, in the order of registration

    def visit(parent: nn.Module, prefix: str) -> None:
        nonlocal coming
        for short, child in parent.named_children():
            name = prefix + short
            if id(child) in index:
                coming = max(coming, index[id(child)] + 1)
            elif isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                continue  # loose parameters
            elif type(child).forward is nn.Module.forward:
                visit(child, f"{name}.")  # a list, or a mere namespace, isn't called: its modules are
            elif any(id(part) in claimed for part in child.modules()):
                visit(child, f"{name}.")
            elif any(True for _ in child.parameters()):
                owned_modules[name] = min(max(coming, called_after(parent, short)), len(chain) - 1)
                claimed.update(id(part) for part in child.modules())

    def called_after(parent: nn.Module, short: str) -> int:
        """The index of the layer after those that the parent's code calls before its child."""
        ends = {
            other: max(indices) + 1
            for other, sibling in parent.named_children()
            if (indices := [index[id(part)] for part in sibling.modules() if id(part) in index])
        }
        if max(ends.values(), default=0) <= coming:
            return 0
        return max((end for other, end in ends.items() if order_of(parent).is_after(short, other)), default=0)

    order_of = cache(SourceOrder)  # read once for all of a parent's children
    index = {id(module.get_submodule(name)): i for i, name in enumerate(chain)}
    claimed = {id(part) for name in chain for part in module.get_submodule(name).modules()}
    visit(module, "")
    return owned_modules


def _check_trainable(parts: Partition, trainable: set[str]) -> None:
    for stage in range(parts.stages):
        if not any(stage in parts.owners[name] for name in trainable):
            owned = [parts.layers[i] for i in parts.layers_of(stage)]
            raise ValueError(
                f"Stage {stage} of {parts.stages} has no trainable parameter: it owns {_enumerate(owned)}. Use fewer "
                f"stages, or move the cuts with `balance`, e.g. balance=[...layers of each stage...]."
            )


def _enumerate(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:limit])
    return shown + (f", ... ({len(names)} in all)" if len(names) > limit else "")
