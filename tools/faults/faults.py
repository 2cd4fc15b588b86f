"""The faults, each with a module and a layout on which it bites, and where the difference begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.backward import split
from lightning_parallel.checks.first_steps import FirstSteps
from lightning_parallel.gradients.averaging import GradientAverager
from lightning_parallel.gradients.clipping import Clipping
from lightning_parallel.losses.normaliser import BatchLoss, Rule
from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.pipeline.chunk import Chunk
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.seeding import Generators
from lightning_parallel.set_up.splitting import Splitting
from lightning_parallel.set_up.stages import Stages
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.set_up.unit_shards import UnitShards
from lightning_parallel.steps.loss_means import LossMeans
from lightning_parallel.strategies import pipeline
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.pipeline import PipelineStrategy
from lightning_parallel.strategies.tensor import TensorParallelStrategy
from lightning_parallel.tensor import functions, linear
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.linear import RowParallelLinear
from tools.faults.models import WIDTH, WORDS, Vision
from tools.faults.seeding import Seeded, in_place_of, is_seeded, replaced

ANY = "*"  # in the place of a unit: the fault is in all of them alike


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        unit: a pattern of where the difference begins, or of whose parameter differs first.
        phase: "forward" or "backward" of the unit, "gradient" or "update" of the parameter.
        seeded: a context in which the fault is there.
    """

    model: str
    layout: str
    unit: str
    phase: str
    seeded: Seeded


# -- losses and microbatches -------------------------------------------------------------------------------------


def backward_of(microbatch: int | None, scale: float, rank: int | None = None) -> Seeded:
    """The backward of a microbatch, or of all, begins with another number."""

    def begin(original: Any, self: BatchLoss, index: int, factor: float) -> Any:
        return original(self, index, factor * (scale if microbatch in (None, index) else 1))

    return lambda: replaced(BatchLoss, "begin", begin, rank)


@in_place_of(BatchLoss, "begin")
def lost_backward(original: Any, self: BatchLoss, index: int, factor: float) -> Any:
    found = original(self, index, factor)
    return ([], []) if index == 1 else found


@in_place_of(Chunk, "second_half")
def lost_second_half(original: Any, self: Chunk, number: int, completing: Any) -> None:
    if number == 1:
        self._second_halves.popleft()
    else:
        original(self, number, completing)


def parts(change: Callable[[list[Any]], list[Any]], rank: int | None = None) -> Seeded:
    """The microbatches of a batch are others."""

    def changed(original: Any, self: Splitting, batch: Any) -> Any:
        found, sizes = original(self, batch)
        return change(found), sizes

    return lambda: replaced(Splitting, "parts", changed, rank)


def late_labels() -> AbstractContextManager[None]:
    """The last stage has the labels of the batch before."""
    before: list[Any] = []

    def late(original: Any, self: Splitting, batch: Any) -> Any:
        before.append(batch)
        return original(self, (batch[0], before[max(0, len(before) - 2)][1].flip(0)))

    return replaced(Splitting, "parts", late, rank=0)


@in_place_of(LossMeans, "of")
def by_samples(original: Any, self: LossMeans, given: Any, sizes: Any, *, is_first: bool) -> BatchLoss:
    return BatchLoss(sizes, Rule.SAMPLES)


@in_place_of(Chunk, "backward")
def only_last_trained(original: Any, self: Chunk, *args: Any, **kwargs: Any) -> None:
    for parameter in self._stage.named_parameters().values():
        parameter.grad = None
    original(self, *args, **kwargs)


# -- messages ----------------------------------------------------------------------------------------------------


def arriving(change: Callable[[Tensor], Tensor], rank: int = 0) -> Seeded:
    """What the last stage receives is another tensor."""

    def receive(original: Any, self: Arrival) -> list[Tensor]:
        return [x + (change(x.detach()) - x.detach()) for x in original(self)]

    return lambda: replaced(Arrival, "receive", receive, rank)


def stale() -> Callable[[Tensor], Tensor]:
    """Each tensor comes in the place of the next one of its shape."""
    before: dict[Any, Tensor] = {}

    def late(tensor: Tensor) -> Tensor:
        earlier, before[tensor.shape] = before.get(tensor.shape, tensor), tensor.clone()
        return earlier

    return late


def one_entry(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] *= -1  # the bit of the sign
    return changed


def returning(change: Callable[[int, Tensor], Tensor], rank: int = 0) -> Seeded:
    """The gradients that the last stage sends back are others."""

    def gradients(original: Any, self: Arrival) -> list[Tensor]:
        return [change(i, gradient) for i, gradient in enumerate(original(self))]

    return lambda: replaced(Arrival, "gradients", gradients, rank)


def stale_gradients() -> AbstractContextManager[Any]:
    late = stale()
    return returning(lambda i, gradient: late(gradient))()


def overwritten() -> AbstractContextManager[None]:
    """A message lies in the memory of the one before, which its backward has yet to read."""
    before: list[list[Tensor]] = []

    def receive(original: Any, self: Arrival) -> list[Tensor]:
        tensors: list[Tensor] = original(self)
        for old, new in zip(before[-1] if before else [], tensors, strict=False):
            old.data.copy_(new.data) if old.shape == new.shape else None
        before.append(tensors)
        return tensors

    return replaced(Arrival, "receive", receive, rank=0)


# -- parameters and updates --------------------------------------------------------------------------------------


Step = Callable[[], Any]  # the forward, the backward, and the optimizer's step


def stepping(change: Callable[[Step, Optimizer, int], Any], rank: int) -> Seeded:
    """``change(step, optimizer, number)`` in the place of an update, on a rank."""

    def seeded() -> AbstractContextManager[None]:
        numbers = count()

        def step(original: Any, self: Strategy, optimizer: Optimizer, closure: Any, *args: Any, **kwargs: Any) -> Any:
            return change(lambda: original(self, optimizer, closure, *args, **kwargs), optimizer, next(numbers))

        return replaced(Strategy, "optimizer_step", step, rank)

    return seeded


def without_update(step: Step, optimizer: Optimizer, number: int, *, of: tuple[int, ...] | None = None) -> Any:
    """The parameters, or those of a shape, stay as they are."""
    kept = [p for group in optimizer.param_groups for p in group["params"] if of in (None, tuple(p.shape))]
    before = [parameter.detach().clone() for parameter in kept]
    output = step()
    for parameter, values in zip(kept, before, strict=True):
        parameter.data.copy_(values)
    return output


def without_second(step: Step, optimizer: Optimizer, number: int) -> Any:
    return without_update(step, optimizer, number) if number == 1 else step()


def at_double_rate(step: Step, optimizer: Optimizer, number: int) -> Any:
    for group in optimizer.param_groups:
        group["lr"] *= 2
    output = step()
    for group in optimizer.param_groups:
        group["lr"] /= 2
    return output


def without_momentum(step: Step, optimizer: Optimizer, number: int) -> Any:
    optimizer.state.clear()
    return step()


def finishing(change: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]) -> Seeded:
    """``change(own, averages)`` in the place of the gradients' averages over the replicas."""

    def finish(original: Any, self: GradientAverager, gradients: Any) -> Any:
        own = {name: None if g is None else g.clone() for name, g in gradients.items()}
        averages = original(self, gradients)
        return averages if self._group.size() == 1 else change(own, averages)

    return lambda: replaced(GradientAverager, "finish", finish)


def swapped(own: dict[str, Any], averages: dict[str, Any]) -> dict[str, Any]:
    one, other = "blocks.1.down.weight", "blocks.2.down.weight"
    return {**averages, one: averages[other], other: averages[one]}


def first_left_out(own: dict[str, Any], averages: dict[str, Any]) -> dict[str, Any]:
    return {**averages, **{name: own[name] for name in averages if name.startswith("enter")}}


def sharing(change: Callable[[Any, dict[str, Any]], Any]) -> Seeded:
    """Gradients of tied weights aren't summed over the stages."""
    return lambda: replaced(Stages, "summed_shared", lambda f, self, gradients: change(partial(f, self), gradients))


def halved(summed: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    found = summed(gradients)
    return {name: g / 2 if g is not None and found[name] is not gradients[name] else g for name, g in found.items()}


@in_place_of(Stages, "join_shared", rank=0)
def exchanged_layers(original: Any, self: Stages, local: Any, run: Any) -> None:
    """The last stage's layers have each other's weights, as by a checkpoint that is read wrongly."""
    original(self, local, run)
    one, other = local.parameters["blocks.3.up.weight"], local.parameters["blocks.3.down.weight"]
    kept = one.detach().clone()
    one.data.copy_(other.detach().t())
    other.data.copy_(kept.t())


# -- random numbers ----------------------------------------------------------------------------------------------


@in_place_of(Generators, "seed")
def one_mask(original: Any, self: Generators, seed: int, **more: Any) -> None:
    original(self, 7, **more)


@in_place_of(Stage, "run", rank=0)
def in_evaluation(original: Any, self: Stage, *args: Any, **kwargs: Any) -> Any:
    for part in self.module.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    return original(self, *args, **kwargs)


# -- tensor ranks ------------------------------------------------------------------------------------------------


@contextmanager
def unwatched(*faults: AbstractContextManager[Any]) -> Iterator[None]:
    """A fault that the library's own comparisons of tensor ranks would report first."""
    with ExitStack() as stack:
        stack.enter_context(replaced(FirstSteps, "run", lambda original, self, kind, step: step()))
        stack.enter_context(replaced(TensorShards, "_check_whole", lambda original, self, gradients: None))
        for fault in faults:
            stack.enter_context(fault)
        yield


@contextmanager
def without_sum_of_inputs() -> Iterator[None]:
    """A divided layer doesn't sum the gradients of its input over the ranks."""
    own = SimpleNamespace(**{**vars(functions), "sends": lambda x, group: not is_seeded()})
    linear.functions = own  # type: ignore[assignment,attr-defined]
    try:
        with unwatched():
            yield
    finally:
        linear.functions = functions  # type: ignore[attr-defined]


@in_place_of(RowParallelLinear, "forward")
def bias_of_each(original: Any, self: RowParallelLinear, x: Tensor) -> Tensor:
    y: Tensor = original(self, x)
    return y if self.bias is None else y + self.bias


@in_place_of(TensorShards, "begin")
def swapped_shards(original: Any, self: TensorShards, run: Any, local: Any) -> None:
    original(self, run, local)
    for name in ("blocks.1.up.weight", "blocks.1.up.bias"):
        shards = [torch.empty_like(local.parameters[name]) for _ in range(2)]
        dist.all_gather(shards, local.parameters[name].detach())
        local.parameters[name].data.copy_(shards[1 - dist.get_rank()])


@in_place_of(VocabParallelEmbedding, "forward")
def unmasked(original: Any, self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    rows = nn.functional.embedding((ids - self._start).clamp(0, self.weight.shape[0] - 1), self.weight)
    return functions.reduce_(rows, self.site.group)


# -- fully sharded -----------------------------------------------------------------------------------------------


@in_place_of(UnitShards, "divide")
def summed_gradients(original: Any, self: UnitShards, run: Any) -> None:
    original(self, run)
    for unit in self._units:
        unit.set_gradient_divide_factor(1.0)


@contextmanager
def one_share() -> Iterator[None]:
    """All replicas read the first one's share."""
    original = LayoutStrategy.distributed_sampler_kwargs

    def kwargs(self: LayoutStrategy) -> Any:
        found = original.fget(self)  # type: ignore[attr-defined]
        return {**found, "rank": 0} if is_seeded() and found else found

    LayoutStrategy.distributed_sampler_kwargs = property(kwargs)  # type: ignore[assignment]
    try:
        yield
    finally:
        LayoutStrategy.distributed_sampler_kwargs = original  # type: ignore[method-assign]


# -- the table ---------------------------------------------------------------------------------------------------

FAULTS: dict[str, Fault] = {
    # losses and microbatches
    "gradients are larger by the number of tokens (torchtitan #2972)": Fault(
        "Words", "stages", "head", "backward", backward_of(None, 32.0)
    ),
    "gradients are averaged over microbatches once more (torchtitan #1732)": Fault(
        "Blocks",
        "stages",
        ANY,
        "gradient",
        lambda: replaced(PipelineStrategy, "gradient_factor", lambda f, self: f(self) / 4),
    ),
    "only the last microbatch trains (Automodel #3530)": Fault("Blocks", "stages", ANY, "gradient", only_last_trained),
    "the picture is a placeholder (Automodel #2192)": Fault(
        "Pictures",
        "stages",
        "vision.net.0",
        "forward",
        lambda: replaced(Vision, "forward", lambda f, self, x: f(self, torch.zeros_like(x))),
    ),
    "the loss is divided by the ranks that share it (Megatron-LM #673)": Fault(
        "Blocks",
        "tensor",
        "head",
        "backward",
        lambda: replaced(TensorParallelStrategy, "training_step", lambda f, *a, **k: f(*a, **k) / 2),
    ),
    "losses are weighted by samples, not tokens (verl #5625)": Fault("Words", "stages", "head", "backward", by_samples),
    "a microbatch's backward doesn't run": Fault("Blocks", "stages", "head", "backward", lost_backward),
    "a microbatch counts twice": Fault("Blocks", "stages", "head", "backward", backward_of(1, 2.0)),
    "a microbatch is read twice, another one never": Fault(
        "Blocks", "stages", "enter", "forward", parts(lambda x: [x[0], x[0], *x[2:]])
    ),
    "the last stage has other microbatches' labels": Fault(
        "Blocks", "stages", "head", "backward", parts(lambda x: [*x[1:], x[0]], rank=0)
    ),
    "the last stage has the labels of another batch": Fault("Blocks", "stages", "head", "backward", late_labels),
    "the factor of a batch isn't sent on": Fault(
        "Words",
        "stages",
        "blocks.1",
        "backward",
        lambda: replaced(BatchLoss, "take_factor", lambda f, self, factor, index: None, 1),
    ),
    # messages
    "activations are scaled on their way": Fault(
        "Blocks", "stages", "blocks.2", "forward", arriving(lambda x: x * 1.001)
    ),
    "activations are those of the microbatch before": Fault(
        "Blocks", "stages", "blocks.2", "forward", lambda: arriving(stale())()
    ),
    "a bit of an activation is flipped": Fault("Blocks", "stages", "blocks.2", "forward", arriving(one_entry)),
    "activations are rounded to single precision": Fault(
        "Blocks", "stages", "blocks.2", "forward", arriving(lambda x: x.float().double())
    ),
    "an activation is overwritten before its backward": Fault(
        "Blocks", "stages, all forwards first", "blocks.2.norm", "backward", overwritten
    ),
    "gradients are doubled on their way": Fault(
        "Blocks", "stages", "blocks.1", "backward", returning(lambda i, g: g * 2)
    ),
    "gradients are those of the microbatch before": Fault("Blocks", "stages", "blocks.1", "backward", stale_gradients),
    "the gradient of a skip connection is lost": Fault(
        "Pictures", "stages", "vision.net.2", "backward", returning(lambda i, g: g * (i == 1))
    ),
    "a chunk's activations are scaled": Fault(
        "Blocks", "interleaved stages", "blocks.1", "forward", arriving(lambda x: x * 0.5)
    ),
    "a late stage's activations are scaled": Fault(
        "Blocks", "late stages", "blocks.2", "forward", arriving(lambda x: x * 0.5)
    ),
    # parameters
    "a tied weight's gradient isn't summed over the stages": Fault(
        "Words", "stages", "embed", "gradient", sharing(lambda summed, own: own)
    ),
    "a tied weight's gradient is averaged, not summed": Fault("Words", "stages", "embed", "gradient", sharing(halved)),
    "a stage's copy of a tied weight isn't updated": Fault(
        "Words", "stages", "embed", "update", stepping(partial(without_update, of=(WORDS, WIDTH)), rank=0)
    ),
    "two layers have each other's weights": Fault("Blocks", "stages", "blocks.3.up", "forward", exchanged_layers),
    "the second half of a backward doesn't run": Fault("Blocks", "stages in a V", ANY, "gradient", lost_second_half),
    "second halves round to single precision": Fault(
        "Blocks",
        "stages in a V",
        ANY,
        "gradient",
        lambda: replaced(split._Use, "gradient", lambda f, self: f(self).float().double()),
    ),
    "gradients are added twice": Fault(
        "Blocks",
        "stages",
        ANY,
        "gradient",
        lambda: replaced(pipeline, "add_gradients", lambda f, p, g: (f(p, g), f(p, g))),
    ),
    "a stage skips an update": Fault("Blocks", "stages", "blocks.[01].*", "update", stepping(without_second, rank=1)),
    "a stage has twice the rate": Fault(
        "Blocks", "stages", "blocks.[01].*", "update", stepping(at_double_rate, rank=1)
    ),
    "a stage loses its momentum": Fault(
        "Blocks", "stages", "blocks.[01].*", "update", stepping(without_momentum, rank=1)
    ),
    "gradients are clipped by the stage's norm": Fault(
        "Clipped",
        "stages",
        ANY,
        "update",
        lambda: replaced(Clipping, "square", lambda f, self, optimizer, _: f(self, optimizer, self._replicas)),
    ),
    "whole parameters count twice in the norm": Fault(
        "Clipped",
        "tensor",
        ANY,
        "update",
        lambda: replaced(TensorShards, "counts", lambda f, self, name: True),
    ),
    # replicas
    "gradients aren't averaged over replicas": Fault(
        "Blocks", "replicas", ANY, "gradient", finishing(lambda own, averages: own)
    ),
    "gradients are summed over replicas": Fault(
        "Blocks",
        "replicas",
        ANY,
        "gradient",
        finishing(lambda own, averages: {name: g * 2 for name, g in averages.items()}),
    ),
    "gradients lie in the wrong places of a bucket": Fault(
        "Blocks", "replicas", "blocks.1.down", "gradient", finishing(swapped)
    ),
    "the last bucket isn't sent": Fault("Blocks", "replicas", "enter", "gradient", finishing(first_left_out)),
    "a replica's activations are scaled": Fault(
        "Blocks", "stages x replicas", "blocks.2", "forward", arriving(lambda x: x * 3)
    ),
    "all replicas read one share": Fault("Blocks", "fully sharded", "enter", "forward", one_share),
    "gradients are summed over shards": Fault("Blocks", "fully sharded", ANY, "gradient", summed_gradients),
    "a rank doesn't update its shards": Fault(
        "Blocks", "fully sharded", ANY, "update", stepping(without_update, rank=1)
    ),
    # random numbers
    "microbatches share a dropout mask": Fault("Dropped", "stages", "blocks.0.drop", "forward", one_mask),
    "a stage is in evaluation mode": Fault("Dropped", "stages", "blocks.2.drop", "forward", in_evaluation),
    # tensor ranks
    "a row layer doesn't sum": Fault(
        "Blocks",
        "tensor",
        "blocks.0.down",
        "forward",
        lambda: unwatched(replaced(functions, "reduce_", lambda f, x, group: x)),
    ),
    "a column layer doesn't sum the gradients of its input": Fault(
        "Blocks", "tensor", "blocks.3.up", "backward", without_sum_of_inputs
    ),
    "each rank adds the bias of a row layer": Fault("Untied", "tensor", "blocks.0.o", "forward", bias_of_each),
    "ranks have each other's shard": Fault("Blocks", "tensor", "blocks.1.up", "forward", swapped_shards),
    "a module between divided layers doesn't sum its gradient": Fault(
        "Scaled",
        "tensor",
        "blocks.0.up.1",
        "gradient",
        lambda: unwatched(replaced(TensorShards, "completed", lambda f, self, gradients, **_: gradients)),
    ),
    "words of other ranks aren't left out": Fault("Untied", "tensor", "embed", "forward", unmasked),
    "a stage's gradients are doubled on a tensor rank's way": Fault(
        "Blocks", "stages x tensor", "blocks.1", "backward", lambda: unwatched(returning(lambda i, g: g * 2)())
    ),
}
