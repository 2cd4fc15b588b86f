"""`check` says of a layout whether it has the numbers of one process, and of what differs whether it does by nature."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel import PipelineStrategy, check
from lightning_parallel.comparison.check import Comparison
from lightning_parallel.comparison.differences import differences
from lightning_parallel.comparison.evidence import Evidence
from tests.strategies.failures import assert_refused
from tools.faults.models import Base, Blocks, Dropped, Words
from tools.workers.pool import WorkerError, WorkerPool
from tools.workers.worker import ROOT


class Faulty(Blocks):
    """Halves a gradient on ranks that aren't alone, as an average too many would."""

    def on_after_backward(self) -> None:
        weight = self.head.weight
        if self.trainer.num_devices > 1 and isinstance(weight, nn.Parameter) and weight.grad is not None:
            weight.grad.div_(2)


class OwnData(Blocks):
    """Makes its data in set-up. It logs what is zero but for rounding."""

    def setup(self, stage: str) -> None:
        self.own = self.batches()

    def train_dataloader(self) -> Any:
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.enter(batch[0])))
        self.log("center", F.layer_norm(logits, (4,)).mean())
        return F.cross_entropy(logits, batch[1])


def checked(module: Base, strategy: str, options: dict[str, Any]) -> Comparison | None:
    """Every rank has weights of its own at first."""
    torch.manual_seed(int(os.environ["RANK"]))
    for parameter in module.parameters():
        parameter.data.add_(torch.rand_like(parameter), alpha=0.1)
    data = None if isinstance(module, OwnData) else module.batches()
    return check(module, data, strategy=strategy, devices=2, accelerator="cpu", **options)


class Normalised(Blocks):
    """Computes with several samples."""

    def build(self) -> None:
        super().build()
        self.blocks.append(nn.BatchNorm1d(16))


class Averaging(Normalised):
    """Averages its weights after each batch, and computes with the average."""

    def build(self) -> None:
        super().build()
        self.average = nn.Linear(8, 16).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.average(batch[0]).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.weight.data.lerp_(self.enter.weight.data, 0.1)


class LogsOtherwise(Blocks):
    """Logs another number on ranks that aren't alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("ranks", float(self.trainer.world_size), sync_dist=True)
        return super().training_step(batch, batch_idx)


class Keys(Words):
    """Attention's key has a bias, which changes nothing: rounding alone makes its gradient, and Adam steps of that."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), eps=1e-30)


REPLICAS = {"stages": 1, "data_parallel": 2, "microbatches": 1}


@pytest.mark.parametrize(("module", "strategy", "options", "equal", "by_nature"), [
    (OwnData, "pipeline_1f1b", {}, True, False),
    (Blocks, "pipeline_async", {}, True, False),
    (Words, "pipeline_1f1b", {}, True, False),  # halves of a batch have different numbers of labels that count
    (Words, "fully_sharded", {}, False, True),  # replicas average their own means
    (Averaging, "pipeline_1f1b", REPLICAS, False, True),  # its hooks run once for a batch of all replicas
    (LogsOtherwise, "pipeline_1f1b", REPLICAS, False, False),
    (Keys, "pipeline_1f1b", {}, True, False),
    # Without dropout, whose masks are others by nature.
    (Dropped, "tensor_parallel", {}, True, False), (Dropped, "fully_sharded", {}, True, False),
    (Dropped, "pipeline_1f1b", {}, False, True),  # one process draws the same for the same microbatches
])  # fmt: skip
def test_a_layout_is_equal_to_one_process_or_differs_by_nature(
    pool: WorkerPool, module: type[Base], strategy: str, options: dict[str, Any], equal: bool, by_nature: bool
) -> None:
    first, *others = pool.run(checked, 2, module(), strategy, options, init=False)
    assert (first.equal, first.by_nature, first.updates, others) == (equal, by_nature, 3, [None]), str(first)
    assert first.without_dropout == ("Dropout was off" in str(first)) == (module is Dropped and equal)


def checked_one_after_another() -> list[Comparison | None]:
    return [checked(Normalised(), strategy, {}) for strategy in ("pipeline_1f1b", "fully_sharded")]


def test_what_computes_with_several_samples_differs_by_nature(pool: WorkerPool) -> None:
    """A script may check several layouts: one process's run leaves torchrun's variables as they are."""
    for found in pool.run(checked_one_after_another, 2, init=False)[0]:
        assert not found.equal and found.by_nature
        assert found.different[0].update == 0
        assert "buffer blocks.4.running_mean" in {each.name for each in found.different}


class Two(Blocks):
    """Two optimizers. On ranks that aren't alone the second one's gradient is halved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for k, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            if k and self.trainer.num_devices > 1:
                self.head.weight.grad.mul_(0.5)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.enter, self.head)]


def test_each_optimizer_s_step_is_an_update(pool: WorkerPool) -> None:
    found = pool.run(checked, 2, Two(), "tensor_parallel", {"plan": "none", "data_parallel": 2}, init=False)[0]
    first = found.different[0]
    assert (first.update, first.name, first.size) == (1, "gradient of head.weight", pytest.approx(0.5))


def test_runs_that_cannot_be_compared_are_refused(pool: WorkerPool) -> None:
    errors = pool.run(check, 2, Blocks(), Blocks.batches(), devices=4, init=False, expect_errors=True)
    assert_refused(errors, "ValueError", ["4 ranks"])  # not as many as the script has
    with pytest.raises(WorkerError, match="In one process the loss of batch 0 is nan"):
        lost = Blocks()
        lost.enter.weight.data.fill_(math.nan)
        pool.run(checked, 2, lost, "fully_sharded", {}, init=False)
    own = PipelineStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"strategy": PipelineStrategy(), "microbatches": 3}, "microbatches: give options to the strategy"),
        ({"batches": 0}, "batches=0: "), ({"strategy": "auto"}, "strategy='auto'"), ({"data": []}, "data"),
        ({"strategy": own}, "precision of its own"),
    ]  # fmt: skip
    for given, said in wrong:
        with pytest.raises(ValueError, match=said):
            check(Blocks(), **({"data": Blocks.batches()} | given))


def test_rounding_tells_the_tolerance_of_other_precisions(pool: WorkerPool) -> None:
    strategy, options = "pipeline_zbv", {"microbatches": 4, "precision": "bf16-mixed"}
    found = pool.run(checked, 2, Blocks(), strategy, options, init=False)[0]
    assert found.equal, str(found)
    assert found.largest.size > 1e-9
    found = pool.run(checked, 2, Faulty(), strategy, options, init=False)[0]
    assert found.different[0].name == "gradient of head.weight", str(found)


class Prepared(L.LightningDataModule):
    """Draws a number in set-up, by which the batches are changed on their way to a device: by twice as much on ranks
    that aren't alone, if it is ``faulty``."""

    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.faulty = faulty

    def setup(self, stage: str) -> None:
        assert self.trainer is not None and self.trainer.world_size > 0
        self.scale = torch.randint(2, 99, ())

    def train_dataloader(self) -> Any:
        return Blocks.batches()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1, batch[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        return batch[0] / self.scale * (1 + (self.faulty and self.trainer.num_devices > 1)), batch[1]


def checked_datamodule(faulty: bool) -> Comparison | None:
    data = Prepared(faulty)
    found = check(Blocks(), data, strategy="pipeline_1f1b", devices=2, accelerator="cpu")
    assert not hasattr(data, "scale") and data.trainer is None
    return found


def test_hooks_of_a_datamodule_are_called(pool: WorkerPool) -> None:
    found = pool.run(checked_datamodule, 2, False, init=False)[0]
    assert found.equal, str(found)
    assert pool.run(checked_datamodule, 2, True, init=False)[0].different[0].name == "loss"


# -- differences -------------------------------------------------------------------------------------------------


def evidence(**changes: Any) -> Evidence:
    buffers = {"c": torch.tensor([0.5])}
    both = [{"a": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": torch.tensor([0.0])}]
    given = {"losses": [1.0], "gradients": both, "weights": both, "buffers": buffers, "logged": {"x": 2.0}}
    return Evidence(**(given | changes))


def found(*ranks: Evidence) -> dict[str, float]:
    return {each.name: each.size for each in differences(ranks, evidence()) if each.size}


@pytest.mark.parametrize(("changes", "name", "size"), [
    ({"losses": [1.1]}, "loss", 0.1),
    ({"losses": []}, "loss", math.inf),
    ({"logged": {}}, "logged x", math.inf),
    ({"gradients": []}, "number of updates of rank 0, 0 for 1", math.inf),
    ({"gradients": [{"b": torch.zeros(1)}]}, "gradient of a, which no rank has", math.inf),
    ({"gradients": [evidence().gradients[0] | {"b": torch.tensor([math.nan])}]}, "gradient of b", math.inf),
    ({"weights": [{"a": torch.tensor([1.0, 2.0, 3.0, 5.0])}]}, "weight of a", 0.25),
    ({"buffers": {"c": torch.tensor([0.75])}}, "buffer c", 0.5),
    ({"buffers": {}}, "buffer c, which no rank has", math.inf),
    ({"weights": [{"a": torch.full((4,), math.nan)}]}, "weight of a", math.inf),
    ({"weights": [{"a": evidence().weights[0]["a"], "c": torch.ones(1)}]}, "weight of c", math.inf),
])  # fmt: skip
def test_what_differs_is_named_with_its_size(changes: dict[str, Any], name: str, size: float) -> None:
    assert found(evidence(**changes))[name] == pytest.approx(size)


def test_nan_is_equal_to_nan_and_nobody_needs_a_gradient_of_zeros() -> None:
    assert found(evidence(gradients=[{"a": evidence().gradients[0]["a"]}])) == {}
    lost = evidence(gradients=[{"a": torch.tensor([1.0, math.nan]), "b": torch.tensor([math.nan])}], losses=[math.nan])
    assert not any(each.size for each in differences([lost], lost))


SCRIPT = """
from lightning_parallel import check
from tools.faults.models import Blocks

if __name__ == "__main__":
    if found := check(Blocks(), Blocks.batches(), strategy="pipeline_zbv", devices=2, accelerator="cpu"):
        print(found)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_a_script_says_it_once_by_itself_and_under_torchrun(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "check_it.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *launcher, str(script)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("pipeline_zbv on 2 devices: equal to one process.") == 1
