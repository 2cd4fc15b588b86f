"""Optimizers that treat a parameter as a whole, where ranks divide parameters: with the numbers of one process."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel.optimizers.closures import only_once
from lightning_parallel.ranks.local_model import local_part
from tests.strategies.failures import HooksAllOptimizers
from tests.strategies.harness import (
    Report,
    delayed,
    joined,
    largest_difference,
    make_trainer,
    spoil,
    train,
    weights_of,
)
from tests.strategies.models import BATCH
from tests.thorough import thorough
from tools.optimizer_table import optimizers
from tools.optimizer_table.cases import CLIP, LAYOUTS, STAGES, Net, by, fit, replicas_of
from tools.optimizer_table.training import ENTRIES, EXACT, FOUND, expected, make_runner
from tools.zoo.outcome import Outcome


# The table of docs/optimizers.md. LAMB's state goes from layout to layout below.
@pytest.mark.parametrize(
    ("kind", "layouts"), [("Muon", ["stages x tensor"]), *thorough(*((kind, [*FOUND]) for kind in ENTRIES))]
)
def test_an_optimizer_is_that_of_one_process_or_refused(pool: Any, kind: str, layouts: list[str]) -> None:
    runner = make_runner(pool)
    for name in layouts:
        verdict = runner.run("", ENTRIES[kind], FOUND[name])
        assert verdict is not None and verdict.outcome is expected(kind, name), f"{name}: {verdict}"
        assert verdict.outcome is Outcome.EQUAL or kind.rpartition(".")[2] in verdict.detail, f"{name}: {verdict}"


# -- an update ---------------------------------------------------------------------------------------------------


class Writes(Callback):
    """Writes to parameters by hooks, past autograd, as WGAN's clipping does; looks at the optimizer between updates."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        for parameter in module.parameters() if trainer.global_step % 2 else ():
            parameter.data.clamp_(-0.1, 0.1)
        for block in module.blocks if trainer.global_step == 6 else ():
            own = local_part(block.up.weight)
            own.copy_(own.flip(1))  # the sum of its bits stays

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        assert held <= {id(p) for p in module.parameters()}
        trainer.optimizers[0].state_dict()


class NotesOther(Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        for parameter in module.parameters() if trainer.current_epoch == 2 else ():
            parameter.is_scaled = not parameter.is_scaled


class Freezes(Callback):
    """One matrix from the second epoch on, and the other one in the first."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        module.blocks[0].up.weight.requires_grad_(trainer.current_epoch < 1)
        module.blocks[1].up.weight.requires_grad_(trainer.current_epoch > 0)


class DecaysTrained(optimizers.LAMB):
    """Decays what is trained, with a gradient or without."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
            parameter.mul_(0.95)
        return loss


class StartsAnew(optimizers.LAMB):
    """Forgets each parameter's state after five of its steps, which it counts on the parameter, and all after seven."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 7:
            self.state = defaultdict(dict)
        return super().step(closure)

    def move(self, p: Any, g: Tensor, group: dict[str, Any]) -> None:
        super().move(p, g, group)
        p.steps = getattr(p, "steps", 0) + 1
        if p.steps == 5:
            del self.state[p]


def fit_with(kind: Any, callback: Callback, strategy: str, options: Any = None, replicas: int = 1) -> Report:
    given: dict[str, Any] = {"callbacks": [callback], "limit_val_batches": 0, "max_epochs": 3}
    if isinstance(kind, str):
        return fit(kind, strategy, options, replicas, **given)
    own = type("Own", (Net,), {"configure_optimizers": lambda self: kind(self.parameters())})
    module = kind if issubclass(kind, Net) else own
    return train(module, strategy, options, batch_size=BATCH // replicas, **given)


@pytest.mark.parametrize(("kind", "callback", "layout"), [
    ("Kronecker", Writes(), "tensor"),
    (optimizers.Noted, NotesOther(), "tensor"),
    (DecaysTrained, Freezes(), "tensor"),
    (StartsAnew, Writes(), "fully sharded"),
], ids=["writes", "notes", "freezes", "state, writes to parts"])  # fmt: skip
def test_owners_follow_what_changes_on_parameters(launch: Any, kind: Any, callback: Callback, layout: str) -> None:
    ranks, strategy, options = LAYOUTS[layout]
    (single,) = launch(fit_with, 1, kind, callback, "single")
    reports = launch(fit_with, ranks, kind, callback, strategy, options, replicas_of(layout))
    assert largest_difference(joined(reports, "weights"), single.weights) < EXACT


FEATURES: dict[str, dict[str, Any]] = {  # the table has parameter groups, a scheduler and clipping by norm
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "mixed precision": {"precision": "bf16-mixed"},
}
PLACES = ["tensor", "fully sharded", "stages x tensor"]


@pytest.mark.parametrize(("kind", "layout", "feature"), [
    ("LAMB", "tensor", "accumulation"), ("Noted", "tensor", "mixed precision"),
    *thorough(*((kind, layout, feature) for kind in ("Muon", "LAMB", "Noted") for layout in (
        *PLACES, "tensor x data", "stages x fully sharded", "fully sharded x tensor") for feature in FEATURES)),
])  # fmt: skip
def test_owners_have_the_gradients_of_one_process(launch: Any, kind: str, layout: str, feature: str) -> None:
    ranks, strategy, options = LAYOUTS[layout]
    given = {"limit_val_batches": 0, **FEATURES[feature]}
    (single,) = launch(fit, 1, kind, "single", **given)
    reports = launch(fit, ranks, kind, strategy, options, replicas_of(layout), **given)
    allowed = 0.02 if feature == "mixed precision" else EXACT
    assert largest_difference(joined(reports, "weights"), single.weights) < allowed


def fit_late(kind: str) -> Report:
    return delayed(by(kind), **STAGES, clip=CLIP, epochs=2, accumulate=2)


def test_late_batches_are_accumulated_for_owners(launch: Any) -> None:
    ranks, strategy, options = LAYOUTS["late stages x tensor"]
    (expected,) = launch(fit_late, 1, "LAMB")
    reports = launch(fit, ranks, "LAMB", strategy, options, accumulate_grad_batches=2, max_epochs=2)
    assert largest_difference(joined(reports, "weights"), expected.weights) < EXACT


def test_a_closure_is_not_called_twice() -> None:
    closure = only_once(3.0)
    assert closure() == 3.0
    with pytest.raises(RuntimeError, match="twice"):
        closure()


class Adds(Callback):
    """Gives the optimizer a parameter while it trains."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.blocks[2].up.weight.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [module.blocks[2].up.weight]})


class Later(Net):
    def configure_optimizers(self) -> Any:
        self.blocks[2].up.weight.requires_grad_(False)
        return optimizers.LAMB([p for p in self.parameters() if p is not self.blocks[2].up.weight])


@pytest.mark.parametrize(("kind", "callback", "error", "words"), [
    (Later, Adds(), "RuntimeError", ["LAMB", "'blocks.2.up.weight'", "configure_optimizers"]),
    (optimizers.LAMB, HooksAllOptimizers(), "ValueError", ["LAMB", "all optimizers", "on_train_batch_end"]),
])  # fmt: skip
def test_what_owners_cannot_follow_is_refused(
    refused: Any, kind: Any, callback: Callback, error: str, words: list[str]
) -> None:
    """A parameter that comes later, and hooks of steps."""
    refused(words, fit_with, 2, kind, callback, "tensor", error=error)


STAGES_AND_SHARDS = {"stages": 1, "tensor_parallel": 2, "data_parallel_kind": "fully_shard"}


# Those that aren't elementwise where a rank sees a part of what they treat as one.
@pytest.mark.parametrize(("kind", "ranks", "strategy", "options", "words"), [
    ("Prodigy", 2, "tensor", {}, ["TensorParallelStrategy", "tensor_parallel=2", "AdamW"]),
    ("Prodigy", 4, "sync", STAGES_AND_SHARDS, ["divide"]),
    ("Prodigy", 2, "sync", {}, ["PipelineStrategy", "2 stages", "AdamW"]),
    ("SavesMore", 2, "tensor", {}, ["'base', 'steps'", "optimizer.state"]),
    ("DividesItsWork", 2, "tensor", {}, ["TensorParallelStrategy", "allgather", "single process", "Muon"]),
    ("DividesItsWork", 2, "fsdp", {}, ["FullyShardedStrategy", "allgather", "single process", "Muon"]),
    ("KeepsIds", 2, "tensor", {}, ["keeps", "'kept'", "TensorParallelStrategy", "parameter group"]),
    ("KeepsParameters", 2, "fsdp", {}, ["keeps", "'kept'", "FullyShardedStrategy", "parameter group"]),
    ("KeepsParameters", 2, "sync", {}, ["keeps", "'kept'", "PipelineStrategy", "parameter group"]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_would_train_another_model_is_refused_before_training(
    refused: Any, kind: str, ranks: int, strategy: str, options: dict[str, Any], words: list[str]
) -> None:
    refused([kind, *words], fit_with, ranks, getattr(optimizers, kind), Callback(), strategy, options)


class MadeWithTheModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.made = optimizers.Kronecker(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.made

    def on_train_start(self) -> None:
        torch.optim.lr_scheduler.ConstantLR(self.made, 1.0)  # it takes the place of `step`


def fit_twice(strategy: str, replicas: int = 1) -> dict[str, Tensor]:
    """The optimizer of the second fit has a state."""
    module, trainer = MadeWithTheModule(), make_trainer(strategy, [], {}, max_epochs=1)
    share = trainer.distributed_sampler_kwargs if replicas > 1 else None
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, module.loader(False, BATCH // replicas, 12, share))
    return weights_of(module)


def test_a_second_fit_goes_on_with_the_state_of_the_first(launch: Any) -> None:
    (single,) = launch(fit_twice, 1, "single")
    for weights in launch(fit_twice, 2, "fsdp", 2):
        assert largest_difference(weights, single) < EXACT
    divided = launch(fit_twice, 2, "tensor")
    assert largest_difference(*({"scale": each["scale"]} for each in (divided[0], single))) < EXACT


# -- checkpoints -------------------------------------------------------------------------------------------------


def go_on(kind: str, layout: str | None, epochs: int, read: Path | None, write: Path) -> dict[str, Tensor]:
    """Train on from a checkpoint up to some epochs, and save. The weights of this rank."""
    _, strategy, options = LAYOUTS[layout] if layout else (1, "single", {})
    module, trainer = by(kind)(), make_trainer(strategy, [], options, max_epochs=epochs, gradient_clip_val=0.5)
    replicas = replicas_of(layout or "")
    share = trainer.distributed_sampler_kwargs if replicas > 1 else None
    if read is not None:
        spoil(module)
    trainer.fit(module, module.loader(False, BATCH // replicas, 12, share), ckpt_path=read)
    trainer.save_checkpoint(write)
    return weights_of(module)


@pytest.mark.parametrize(("kind", "legs"), [
    ("LAMB", [None, "fully sharded x tensor", "stages x tensor", None]),
    *thorough(
        ("LAMB", ["tensor", "tensor x data", "stages x fully sharded", None]),
        ("LAMB", [None, "tensor", "tensor", None]),
        ("Muon", [None, "fully sharded", "fully sharded", None]),
    ),
], ids=str)  # fmt: skip
def test_state_goes_from_layout_to_layout(launch: Any, tmp_path: Path, kind: str, legs: list[str | None]) -> None:
    (expected,) = launch(go_on, 1, kind, None, len(legs), None, tmp_path / "whole")
    read = None
    for epochs, layout in enumerate(legs, 1):
        ranks, write = LAYOUTS[layout][0] if layout else 1, tmp_path / str(epochs)
        found, *_ = launch(go_on, ranks, kind, layout, epochs, read, write)
        read = write
    assert largest_difference(found, expected) < EXACT
