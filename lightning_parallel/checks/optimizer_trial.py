"""Finds optimizers that would give other numbers on parts of the parameters.

Elementwise optimizers (SGD, AdamW, ...) give the same. Others treat a matrix as a whole (Muon, LAMB, Adafactor), or
compute numbers over several parameters (Prodigy, a norm of all gradients): on parts they are other optimizers, without
an error. No list of names can be complete. So before training, copies of the user's optimizer make some steps on small
parameters, once whole, and once divided as the ranks have them::

    whole             one copy           steps   [a, b]
    tensor ranks      a copy for each    steps   [a's first half, b's first half]    [a's second half, b's second half]
    stages            a copy for each    steps   [a]    [b]
    fully sharded     one copy           steps   [a, b] as DTensors, which may compute with the whole
    owners            a copy for each    steps   [a]    [b]    [], for a rank that owns none
    chunks in a V     one copy           steps   [a], then [b]: it holds both, and one has no gradients

Parameter groups that only differ as parts are stepped as wholes, by the ranks that own them
(:mod:`lightning_parallel.optimizers.owners`). If they differ there too, the optimizer is refused.

The values, the gradients and the sizes are made up. The number of dimensions, the groups and all options but the
learning rate are the user's. The rate is 1: a scheduler may begin with 0, and a small rate changes Prodigy's estimates
too late to be seen.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_parallel.checks.no_collectives import CollectiveError, no_collectives
from lightning_parallel.optimizers.owners import only_once
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.seeding import TorchGenerators
from lightning_parallel.values import same_value

# Of the gradients of each step. Lookahead acts every fifth or sixth, SOAP every tenth. Some take a norm only where it
# is small. Small ones come first, since momentum and second moments remember large ones.
_SCALES = (1e-3,) * 6 + (1.0,) * 6
_TOLERANCE = 1e-7  # of the largest change of a parameter: rounding makes far less, a norm of a half far more
_LARGEST = 32  # size of a dimension in the trial: some treat matrices as such from 16 on
_LARGEST_OF_MANY = 8  # of more than two dimensions


@dataclass(frozen=True)
class _Trial:
    """A made-up parameter.

    Attributes:
        group: the index of its parameter group.
        name: the name of a parameter of the user's that it stands for.
        like: the parameter of that name.
        dim: the dimension along which tensor ranks divide it; None: not divided.
        value: its value before the first step.
        slope, pull: they give the gradient ``slope * value + pull``, which changes from step to step, and is scaled.
    """

    group: int
    name: str
    like: Tensor
    dim: int | None
    value: Tensor
    slope: Tensor
    pull: Tensor

    def is_owned_in(self, groups: set[int]) -> bool:
        """Has one rank all of it, and the others nothing, where parameters of these groups are stepped as wholes?"""
        return self.group in groups and (self.dim is not None or isinstance(self.like, DTensor))


Piece = Callable[[Tensor], Tensor]  # makes of something of a trial's shape what one copy of the optimizer sees
Pieces = list[tuple[_Trial, Piece]]


def stepped_whole(optimizer: Optimizer, local: LocalModel, layout: Layout, strategy: str) -> set[int]:
    """The indices of the parameter groups whose divided parameters the optimizer has to step as wholes, on the ranks
    that own them. All ranks call it. ``strategy`` is the class's name, for messages.

    Raises:
        ValueError: the optimizer is another one there, too. It names the optimizer, a parameter, the axis, and what
            would work.
    """
    kind = type(optimizer).__name__
    trials = list(_trials(optimizer, local))
    if not trials or not (layout.stages > 1 or local.shards or local.is_fully_sharded):
        return set()
    with TorchGenerators(local_part(trials[0].like).device).kept():
        try:
            whole = _tried(optimizer, trials)
        except CollectiveError as error:
            raise ValueError(
                f"{kind} under {strategy}: in a step {error}, to divide its work over them, but they have parts of the "
                f"model here. Use its variant for a single process, such as torch.optim.Muon: where ranks divide "
                f"parameters, they divide its work, too."
            ) from error
        except _UntriedError as error:
            _warn(kind, strategy, str(error))
            return set()
        found: set[int] = set()
        for axis, divided in _divisions(trials, layout).items():
            groups, problem = _differences(optimizer, trials, whole, divided)
            if groups and axis.divides:
                found |= groups
                _, problem = _differences(optimizer, trials, whole, _owned(trials, found), closure_first=True)
            if problem:
                raise ValueError(f"{kind} under {strategy}: {axis.words}. {problem} {_ADVICE}")
    return found


def refuse_steps_apart(optimizer: Optimizer, local: LocalModel, strategy: str) -> None:
    """Refuse an optimizer that trains otherwise if it makes two steps an update, one for each half of its parameters,
    or of which no trial can tell. ``strategy`` is the class's name and the setting that asks for it, for messages.

    Raises:
        ValueError: it names the optimizer, a parameter, and what would work.
    """
    kind = type(optimizer).__name__
    trials = list(_trials(optimizer, local))
    if not trials:
        return
    options, options_apart = list[dict[str, Any]](), list[dict[str, Any]]()
    with TorchGenerators(local_part(trials[0].like).device).kept():
        try:
            together = _tried(optimizer, trials, closure_first=True, options=options)
        except (CollectiveError, _UntriedError) as error:
            raise ValueError(
                f"{kind} under {strategy}: {_APART} Whether it trains as with one step could not be tried on small "
                f"parameters: {str(error).rstrip('.')}. Use one that can be tried, such as AdamW, or schedule='1f1b'."
            ) from error
        try:
            apart = _stepped(optimizer, _whole(trials), closure_first=True, in_halves=True, options=options_apart)
        except Exception as error:  # any: it would come in the first update
            raise ValueError(f"{kind} under {strategy}: {_APART} {_fails(error)}") from error
    for trial, one, other in zip(trials, together, apart, strict=True):
        if not (one - other).abs().max() <= _TOLERANCE * (one - trial.value).abs().max():
            raise ValueError(
                f"{kind} under {strategy}: {_APART} Tried on small parameters, it changes what "
                f"stands for '{trial.name}' (parameter group {trial.group}) otherwise than with one step. Let it keep "
                f"what it counts in optimizer.state[parameter], or use schedule='1f1b'."
            )
    # A count may matter later than a trial goes, as that of a long warm-up.
    for group, (one_step, two_steps) in enumerate(zip(options, options_apart, strict=True)):
        for key, value in one_step.items():
            if key != "params" and not same_value(value, two_steps.get(key)):
                raise ValueError(
                    f"{kind} under {strategy}: {_APART} Tried on small parameters, it writes "
                    f"another {key!r} into the options of parameter group {group} than with one step. Let it keep what "
                    f"it counts in optimizer.state[parameter], or use schedule='1f1b'."
                )


_APART = "in a V it makes two steps an update, one for each of a stage's chunks."

def _fails(error: Exception) -> str:
    return f"Tried on small parameters, it fails there: {type(error).__name__}: {str(error).rstrip('.')}."


_ADVICE = (
    "Use an optimizer that treats each parameter by itself, such as AdamW or Muon, or strategy='ddp', which leaves "
    "every rank all parameters."
)


def _warn(kind: str, strategy: str, reason: str) -> None:
    rank_zero_warn(
        f"{kind} could not be tried on small parameters ({reason}), so nothing is known of it on the parts of "
        f"parameters that the ranks of {strategy} have. If it isn't elementwise, as SGD and AdamW are, it trains "
        f"another model than one process would."
    )


class _Axis(NamedTuple):
    """In ``words`` for messages, why a rank lacks something. Does the axis divide parameters?"""

    words: str
    divides: bool


def _divisions(trials: list[_Trial], layout: Layout) -> dict[_Axis, list[Pieces]]:
    """The ways in which the ranks divide the trial's parameters: for each copy, the pieces it sees."""
    divisions: dict[_Axis, list[Pieces]] = {}
    cut = [trial for trial in trials if trial.dim is not None]
    if cut:
        axis = _Axis(f"tensor ranks divide '{cut[0].name}' (tensor_parallel={layout.size('tensor')})", True)
        divisions[axis] = [[(trial, _half(trial.dim, index)) for trial in trials] for index in range(2)]
    if layout.stages > 1:
        axis = _Axis(f"each of {layout.stages} stages has only its own parameters, such as '{trials[0].name}'", False)
        divisions[axis] = [_whole(trials[index::2]) for index in range(2)]
    sharded = [trial for trial in trials if isinstance(trial.like, DTensor)]
    if sharded:
        axis = _Axis(f"'{sharded[0].name}' is fully sharded over {layout.size('data')} replicas", True)
        divisions[axis] = [[(trial, _sharded_as(trial.like)) for trial in trials]]
    return divisions


def _owned(trials: list[_Trial], groups: set[int]) -> list[Pieces]:
    """What two owners see, and a rank that owns none: of these groups one of each two divided parameters, as a whole;
    else what ranks have."""
    pieces: list[Pieces] = []
    for index in range(3):
        is_here = [not trial.is_owned_in(groups) or number % 2 == index for number, trial in enumerate(trials)]
        seen = itertools.compress(trials, is_here)
        pieces.append([(each, Tensor.clone if each.group in groups else _half(each.dim, index % 2)) for each in seen])
    return pieces


def _differences(
    optimizer: Optimizer, trials: list[_Trial], whole: list[Tensor], divided: list[Pieces], closure_first: bool = False
) -> tuple[set[int], str]:
    """The groups for which the optimizer is another one if the parameters are divided like this, and in words what is
    wrong with the first of them."""
    results: dict[int, list[Tensor]] = defaultdict(list)
    for pieces in divided:
        try:
            stepped = _stepped(optimizer, pieces, closure_first)
        except Exception as error:  # any: it would come in the first update
            groups = {trial.group for trial in trials}
            return groups, _fails(error)
        for (trial, _), result in zip(pieces, stepped, strict=True):
            results[id(trial)].append(result)
    found: dict[int, str] = {}
    for trial, one in zip(trials, whole, strict=True):
        parts = results[id(trial)][:2]  # a rank that owns none has the first once more
        joined = torch.cat(parts, trial.dim) if parts[0].shape != one.shape else parts[0]  # type: ignore[arg-type]
        # Offloaded parameters are on the CPU, and where they are gathered is on a GPU.
        if not (joined.to(one.device) - one).abs().max() <= _TOLERANCE * (one - trial.value).abs().max():  # NaN too
            found.setdefault(
                trial.group,
                f"Tried on small parameters, it changes what stands for '{trial.name}' (parameter group {trial.group}) "
                f"otherwise there than in one process.",
            )
    return set(found), next(iter(found.values()), "")


# -- made-up parameters ------------------------------------------------------------------------------------------


def _trials(optimizer: Optimizer, local: LocalModel) -> Iterator[_Trial]:
    """Two made-up parameters for each kind in each group, so that none is alone."""
    generator = torch.Generator().manual_seed(0)
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, tuple[str, Tensor]] = {}
        for parameter in group["params"]:
            if parameter.numel():  # frozen ones may be trained later
                name = local.names.get(id(parameter), "a parameter outside of the module")
                shard = local.shards.get(name)
                kind = (parameter.ndim, shard and shard.dim, _uneven(parameter), _notes(optimizer, parameter))
                if kind not in kinds or parameter.numel() > kinds[kind][1].numel():
                    kinds[kind] = (name, parameter)
        for (_, dim, *_), (name, parameter) in kinds.items():
            device = local_part(parameter).device
            for _ in range(2):
                yield _Trial(index, name, parameter, dim, *_made_up(_shape(parameter, dim), device, generator))


def _uneven(parameter: Tensor) -> int:
    """The number of rows by which the size is too large for equal parts."""
    return parameter.shape[0] % parameter.device_mesh.size() if isinstance(parameter, DTensor) else 0


def _notes(optimizer: Optimizer, parameter: Tensor) -> frozenset[tuple[tuple[str, str], str]]:
    """What the user has noted on a parameter, or the optimizer in its state, that may divide its group, such as
    ``use_muon``. Of a state no counts are taken: after an earlier fit only its owner has them."""
    notes = {("note", key): repr(value) for key, value in vars(parameter).items() if not isinstance(value, Tensor)}
    state = optimizer.state.get(parameter, {}).items()
    notes.update({("state", key): repr(value) for key, value in state if isinstance(value, bool | str)})
    return frozenset(notes.items())


def _shape(parameter: Tensor, dim: int | None) -> list[int]:
    largest = _LARGEST if parameter.ndim <= 2 else _LARGEST_OF_MANY
    shape = [min(size, largest) for size in parameter.shape]
    if dim is not None:
        shape[dim] = max(2, shape[dim])
    if isinstance(parameter, DTensor) and parameter.shape[0] > largest:
        ranks = parameter.device_mesh.size()
        shape[0] = max(1, largest // ranks) * ranks + _uneven(parameter)
    return shape


def _made_up(shape: list[int], device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A value, a slope and a pull. They grow along each dimension, so that no part is like another."""
    drawn = torch.randn(3, *shape, generator=generator, dtype=torch.float64, device=generator.device)
    value, slope, pull = drawn.to(device)  # equal on all ranks
    growing = torch.ones_like(value)
    for dim, size in enumerate(shape):
        growing *= torch.linspace(1, 3, size, device=device).view(-1, *[1] * (len(shape) - dim - 1))
    return value * growing, 0.5 + 0.2 * slope.tanh(), pull * growing


def _half(dim: int | None, index: int) -> Piece:
    return Tensor.clone if dim is None else lambda whole: whole.tensor_split(2, dim)[index].clone()


def _sharded_as(like: Tensor) -> Piece:
    if not isinstance(like, DTensor):
        return Tensor.clone
    # All ranks have made the same: nothing is sent.
    return lambda whole: distribute_tensor(whole.clone(), like.device_mesh, like.placements, src_data_rank=None)


# -- copies of the optimizer -------------------------------------------------------------------------------------


class _UntriedError(Exception):
    """No trial can tell: the message says why."""


def _tried(optimizer: Optimizer, trials: Sequence[_Trial], **options: Any) -> list[Tensor]:
    """As :func:`_stepped` on whole parameters, in which each has to move.

    Raises:
        CollectiveError: the optimizer would talk to other ranks.
        _UntriedError: it fails on small parameters, or leaves some where they were.
    """
    try:
        moved = _stepped(optimizer, _whole(trials), **options)
    except CollectiveError:
        raise
    except Exception as error:  # any: the user's optimizer may need what a trial doesn't have
        raise _UntriedError(f"{type(error).__name__}: {error}") from error
    ways = [(one - trial.value).abs().max() for one, trial in zip(moved, trials, strict=True)]
    if not all(0 < way < torch.inf for way in ways):
        raise _UntriedError("it left parameters as they were, or made them infinite")
    return moved


def _whole(trials: Sequence[_Trial]) -> Pieces:
    return [(trial, Tensor.clone) for trial in trials]


def _stepped(
    optimizer: Optimizer,
    pieces: Pieces,
    closure_first: bool = False,
    in_halves: bool = False,
    options: list[dict[str, Any]] | None = None,
) -> list[Tensor]:
    """The pieces of parameters after steps of a copy of the optimizer. A piece that was a DTensor is whole again.
    ``closure_first``: gradients are made before the step, as for owners. ``in_halves``: it makes two steps an
    update, each with the gradients of every other parameter. ``options`` gets the copy's groups after its steps."""
    given = [[piece(x) for x in (trial.value, trial.slope, trial.pull)] for trial, piece in pieces]
    parameters = [nn.Parameter(value) for value, _, _ in given]
    for (trial, _), parameter in zip(pieces, parameters, strict=True):
        vars(parameter).update(vars(trial.like))  # what the user has noted on it
    twin = _twin(optimizer, [(trial, each) for (trial, _), each in zip(pieces, parameters, strict=True)])
    calls = 0

    @torch.no_grad()
    def closure() -> Any:  # as Lightning's, a tensor
        nonlocal calls
        calls += 1  # some call it twice in a step, after they have moved the parameters
        for parameter, (_, slope, pull) in zip(parameters, given, strict=True):
            parameter.grad = (slope * parameter + pull * (1 + calls % 3)) * scale
        return torch.ones(())

    with no_collectives():
        for scale in _SCALES:  # noqa: B007  the closure reads it
            if in_halves:
                closure()
                gradients = [parameter.grad for parameter in parameters]
                for half in range(2):
                    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                        parameter.grad = gradient if number % 2 == half else None
                    type(twin).step(twin, closure=only_once(None))
                continue
            once: Callable[[], Any] = only_once(closure()) if closure_first else closure
            type(twin).step(twin, closure=once)  # a scheduler has replaced the method of the optimizer itself
    if options is not None:
        options += twin.param_groups
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in parameters]


def _twin(optimizer: Optimizer, parameters: Sequence[tuple[_Trial, nn.Parameter]]) -> Optimizer:
    """A copy of the optimizer with other parameters, and without hooks.

    Its class may take other arguments than its groups have, and it may hold another optimizer with the same groups. So
    it isn't made anew: what it holds is copied, and each of the user's parameters in it is replaced by a small one.
    """
    cls = type(optimizer)
    twin = cls.__new__(cls)
    Optimizer.__setstate__(twin, {"defaults": dict(optimizer.defaults)})  # what torch keeps itself, hooks too
    state: dict[Any, Any] = defaultdict(dict)
    for trial, parameter in parameters:
        values = optimizer.state.get(trial.like)  # some make it before the first step
        if values and not any(_is_of_whole(value, trial.like) for value in values.values()):
            state[parameter] = {key: _like(value, trial.like, parameter) for key, value in values.items()}
    nobody = nn.Parameter(torch.zeros(()))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): state}
    memo.update((id(p), nobody) for group in optimizer.param_groups for p in group["params"])
    own = {name: value for name, value in vars(optimizer).items() if name not in vars(twin) and name != "step"}
    vars(twin).update(copy.deepcopy(own, memo))
    for index, group in enumerate(twin.param_groups):
        group["params"] = [parameter for trial, parameter in parameters if trial.group == index]
        if isinstance(rate := group.get("lr"), int | float | Tensor):
            group["lr"] = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0
    if callable(train := getattr(twin, "train", None)):  # schedule-free ones
        train()
    return twin


def _is_of_whole(value: Any, part: Tensor) -> bool:
    """Is it an owner's, from an earlier fit?"""
    return isinstance(value, Tensor) and value.numel() > 1 and value.shape != part.shape


def _like(value: Any, parameter: Tensor, small: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value)
    here = local_part(value).flatten()
    # A constant was set before the first step, on all ranks. After steps of an earlier fit each rank has entries of its
    # own, and the trial's are to be the same on all.
    is_constant = here.numel() > 1 and bool((here == here[0]).all())
    return torch.full_like(small, float(here[0]) if is_constant else 0.0, requires_grad=False)


def refuse_strange_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters that an optimizer has and the module hasn't: no rank would train them, or each another copy.

    Raises:
        ValueError: there are some.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that isn't one of "
                    f"the module's. Register what holds it on the LightningModule, as an nn.Module."
                )


def refuse_own_format(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose class saves more than torch's do: checkpoints have states by parameters' names.

    Raises:
        ValueError: it names what would be lost.
    """
    if type(optimizer).state_dict is not Optimizer.state_dict:
        more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if more:
            raise ValueError(
                f"{type(optimizer).__name__}.state_dict() adds {more} to torch's format. A checkpoint for every layout "
                f"has what optimizer.state and the parameter groups have, and would lose it. Keep it in "
                f"optimizer.state[parameter] or as an option of the groups, or use strategy='ddp'."
            )
