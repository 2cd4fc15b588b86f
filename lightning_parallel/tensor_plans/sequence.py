"""Sequence parallelism: activations between the sharded regions are divided along the sequence.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2. Between a row
layer and the next column layer (norms, dropout, residual sums), all ranks of plain tensor parallelism hold and compute
the same. Here each rank has a piece of the sequence instead. Memory for these activations falls by the number of ranks,
and the bytes sent stay the same, since an all-reduce is a reduce-scatter and an all-gather::

    hidden state     [batch, time, width]       before the blocks, equal on all ranks
    split            [batch, time / t, width]   at the first block
      norm                                      position by position, on a piece
      gather_sum     [batch, time, width]       at the attention and the MLP: the modules that hold column layers
        column, row                             the row layer's sum is a reduce_scatter
      residual       [batch, time / t, width]
    gather           [batch, time, width]       after the last block

Inside the blocks each rank's gradients come from its own piece of the computation. So the gradients of all parameters
that aren't divided (norms, biases of row layers) are partial: their sum over the ranks is the gradient.

The blocks, and the modules inside that gather, get an instance attribute ``forward``. Hooks would not work: they also
run where a pipeline stands in for an absent layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.private.torch.tensors import tree_flatten, tree_unflatten
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import is_linear
from lightning_parallel.tensor_plans.style import Rule
from lightning_parallel.tensor_plans.styles import STYLES

_TIME = 1  # the sequence's dimension of a hidden state [batch, time, width]


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, on pieces of the sequence; and the modules inside that need the whole
    sequence, those that hold column layers. Both by name."""

    blocks: dict[str, nn.Module]
    gathering: dict[str, nn.Module]

    def holds(self, rule: Rule) -> bool:
        return any(rule.name.startswith(f"{block}.") for block in self.blocks)

    def parameters(self) -> Iterator[nn.Parameter]:
        for block in self.blocks.values():
            yield from block.parameters()

    def wrap(self, site: Site) -> None:
        """Make the blocks work on pieces from now on."""
        piece = _Piece()
        for name, module in self.gathering.items():
            module.forward = _Gathering(module, name, site, piece)  # type: ignore[method-assign]
        names = list(self.blocks)
        for name, block in self.blocks.items():
            first, last = name == names[0], name == names[-1]
            block.forward = _OnPieces(block, name, site, piece, first, last)  # type: ignore[method-assign]


# -- which modules -----------------------------------------------------------------------------------------------


def find_chains(module: nn.Module, rules: list[Rule]) -> list[Chain]:
    """The chains of blocks in ``module``: children of an ``nn.ModuleList`` or ``nn.Sequential``, from the first one
    that holds a column or row layer to the last one that holds a row layer.

    Raises:
        ValueError: there are none, or a block holds something that can't work on a piece of a sequence.
    """
    pairs = [rule for rule in rules if rule.style.leaves_divided or rule.style.takes_divided]
    chains: list[Chain] = []
    containers: list[str] = []  # the outermost ones, as prefixes of names
    for name, container in module.named_modules():
        is_inside = any(name.startswith(outer) for outer in containers)
        if is_inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        containers.append(f"{name}." if name else "")
        children = [(containers[-1] + child, block) for child, block in container.named_children()]
        held = [[rule for rule in pairs if f"{rule.name}.".startswith(f"{child}.")] for child, _ in children]
        rows = [i for i, layers in enumerate(held) if any(rule.style.takes_divided for rule in layers)]
        if not rows:
            continue
        if len(children) < len(container):
            raise _refused(f"{name!r} holds a block twice, so where the blocks begin and end can't be told.")
        first = next(i for i, layers in enumerate(held) if layers)
        blocks = dict(children[first : rows[-1] + 1])
        chains.append(Chain(blocks, _gathering(module, blocks, rules)))
    if not chains:
        raise _refused(
            "it needs blocks, children of an nn.ModuleList or nn.Sequential, with layers of style 'row' in them, but "
            "the plan has none."
        )
    _check_shared(module, chains)
    return chains


def _gathering(module: nn.Module, blocks: dict[str, nn.Module], rules: list[Rule]) -> dict[str, nn.Module]:
    """The parents of the column layers in ``blocks``."""
    divided: set[str] = set()
    gathering: dict[str, nn.Module] = {}
    for rule in rules:
        inside = [name for name in rule.called_names if any(f"{name}.".startswith(f"{block}.") for block in blocks)]
        if not inside:
            continue
        if not rule.style.in_sequence_blocks:
            fitting = ", ".join(repr(name) for name, style in STYLES.items() if style.in_sequence_blocks)
            raise _refused(
                f"{rule.name!r} has the style {rule.text!r}, but inside of blocks only {fitting} work on a "
                f"divided sequence.",
                "Turn it off, or change the plan.",
            )
        divided.update(inside if rule.style.leaves_divided or rule.style.takes_divided else ())
        for name in inside if rule.style.leaves_divided else ():
            parent = name.rpartition(".")[0]
            if name in blocks or parent in blocks:
                block = name if name in blocks else parent
                raise _refused(
                    f"there is no module (attention, MLP) between {name!r} and the block {block!r}, before which the "
                    f"sequence could be gathered."
                )
            gathering[parent] = module.get_submodule(parent)
    for name in list(gathering):
        for outer in (other for other in gathering if name.startswith(f"{other}.")):
            raise _refused(
                f"{outer!r} holds column layers, and so does {name!r} inside of it: where to gather the sequence is "
                f"unclear."
            )
    for name, child in blocks.items():
        _check_positionwise(name, child, gathering, divided)
    return gathering


def _check_positionwise(name: str, module: nn.Module, gathering: dict[str, nn.Module], divided: set[str]) -> None:
    """Refuse modules that work on a piece of the sequence but not position by position, such as an attention that the
    plan forgot."""
    if name in gathering or name in divided:
        return
    if any(other.startswith(f"{name}.") for other in (*gathering, *divided)):
        for child, submodule in module.named_children():
            _check_positionwise(f"{name}.{child}", submodule, gathering, divided)
        return
    # Models bring norms of their own (LlamaRMSNorm, NemotronLayerNorm1P). Others take statistics over the sequence.
    known = is_linear(module) or re.search("LayerNorm|RMSNorm", type(module).__name__) is not None
    if not known and any(True for _ in module.parameters()):
        raise _refused(
            f"{name!r} ({type(module).__name__}) is in a block, but not in the plan. It would see a piece of the "
            f"sequence, and isn't known to work position by position.",
            "Turn it off, or divide the module.",
        )


def _check_shared(module: nn.Module, chains: list[Chain]) -> None:
    """Refuse a parameter of a block that is also used outside: it would get partial and whole gradients, added up."""
    blocks = [block for chain in chains for block in chain.blocks]
    inside = {id(parameter) for chain in chains for parameter in chain.parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not any(name.startswith(f"{block}.") for block in blocks):
            raise _refused(f"the parameter {name!r} is shared with a block.")


def _refused(problem: str, fix: str = "Turn it off.") -> ValueError:
    return ValueError(f"sequence_parallel=True: {problem} {fix}")


# -- what they do ------------------------------------------------------------------------------------------------


@dataclass
class _Piece:
    """The shape of the hidden state in the block that runs, batch and positions. None between blocks, where a part of
    one may run again in the backward; empty before the first one."""

    shape: torch.Size | None = torch.Size()


@dataclass(eq=False)
class _Wrapped:
    """A module's ``forward``, with the sequence divided or gathered around it."""

    _module: nn.Module
    _name: str
    _site: Site
    _piece: _Piece

    def __post_init__(self) -> None:
        self._forward: Callable[..., Any] = self._module.forward

    def _mapped(
        self, function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``function`` applied to the hidden state, which is the first floating-point tensor, and to
        those of the same shape. Masks and positions stay whole."""
        leaves, spec = tree_flatten((args, kwargs))
        hidden = next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)
        if hidden is None or hidden.dim() != 3:
            shape = "there is none" if hidden is None else f"it has the shape {tuple(hidden.shape)}"
            raise _refused(
                f"the first tensor that {self._name!r} is called with must be a hidden state [batch, sequence, "
                f"features], but {shape}."
            )
        done: dict[int, Tensor] = {}  # the same tensor may come as query, key and value
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor):
                continue
            if x.shape == hidden.shape:
                if id(x) not in done:
                    done[id(x)] = function(x)
                leaves[i] = done[id(x)]
            elif x.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"sequence_parallel=True: {self._name!r} is called with a hidden state of shape "
                    f"{tuple(hidden.shape)} and with one of {tuple(x.shape)} that needs a gradient too (from an "
                    f"encoder?). That gradient would be wrong. Turn it off."
                )
        mapped: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
        return mapped


class _Gathering(_Wrapped):
    """The forward of an attention or an MLP: it gets pieces, and sees the whole sequence. Its row layer returns
    pieces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._mapped(self._whole, args, kwargs)
        return self._forward(*args, **kwargs)

    def _whole(self, x: Tensor) -> Tensor:
        if self._piece.shape is not None and x.shape[:2] != self._piece.shape:
            raise _refused(
                f"{self._name!r} gets a tensor of shape {tuple(x.shape)}, but the hidden state of its block begins "
                f"with {tuple(self._piece.shape)}: the block rearranges it between the two (windows, patches of "
                f"several channels), so its dimension 1 isn't the sequence."
            )
        return functions.gather_sum(x, _TIME, self._site.group)


@dataclass(eq=False)
class _OnPieces(_Wrapped):
    """The forward of a block. The first block divides the hidden state, the last one gathers it. Random numbers drawn
    inside are for this rank's piece, so the block as a whole is a sharded region."""

    _first: bool
    _last: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._mapped(self._divided, args, kwargs)
        self._site.enter_region(self._module.training)
        output = self._forward(*args, **kwargs)
        self._site.leave_region()
        self._piece.shape = None
        if not self._last:
            return output
        leaves, spec = tree_flatten(output)
        i = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor)), None)
        if i is None:
            raise _refused(f"{self._name!r} returned no tensor to be gathered.")
        leaves[i] = functions.gather(leaves[i], _TIME, self._site.group)
        return tree_unflatten(leaves, spec)

    def _divided(self, x: Tensor) -> Tensor:
        if self._first and x.shape[_TIME] % self._site.group.size():
            raise _refused(
                f"{self._name!r} got a sequence of {x.shape[_TIME]} positions, which {self._site.group.size()} tensor "
                f"ranks don't divide.",
                "Pad or cut sequences to a multiple.",
            )
        x = functions.split(x, _TIME, self._site.group) if self._first else x
        self._piece.shape = x.shape[:2]
        return x
