"""What a step sees of the ranks: those of the data axis, as in one process or under DDP over the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from tests.strategies.failures import LIMIT
from tests.strategies.harness import Losses, Report
from tests.strategies.observed import Net, loader, make_trainer
from tests.thorough import thorough

REPLICAS = {"stages": 2, "microbatches": 1, "data_parallel": 2}
# By name: the strategy, its options, the number of processes, and that of replicas.
LAYOUTS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "pipeline, replicas": ("sync", REPLICAS, 4, 2),
    "fully sharded": ("sync", {**REPLICAS, "data_parallel_kind": "fully_shard"}, 4, 2),
    "three stages": ("sync", {"microbatches": 1}, 3, 1),
    "zbv": ("sync", {"microbatches": 1, "schedule": "zbv"}, 2, 1),
    "async": ("async", {"microbatches": 1}, 2, 1),
    "tensor, replicas": ("tensor", {"tensor_parallel": 2}, 4, 2),  # which leaves the others to replicas
}


SEEN: dict[str, Any] = {}  # by place, in this process; not on the module, where a step's chunks would share it


class Counting(Net):
    """Takes every other sample, as neuralforecast's models do, and does more of what depends on the ranks."""

    def look(self, place: str) -> None:
        trainer = self.trainer
        ranks = trainer.world_size, trainer.global_rank, self.global_rank, trainer.is_global_zero
        own = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        SEEN[place] = *ranks, *own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look("training_step")
        world = self.trainer.world_size
        share = [part[self.trainer.global_rank :: world] for part in batch]
        return self.logits_and_loss(share)[1]

    def on_train_batch_end(self, *args: Any) -> None:
        self.look("on_train_batch_end")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.look("on_after_batch_transfer")
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look("validation_step")
        self.logits_and_loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look("predict_step")
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        self.look("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


def fit(kind: Callable[[], Net], strategy: str, options: dict[str, Any]) -> tuple[list[float], Any]:
    SEEN.clear()
    report, module = Report(), kind()
    trainer = make_trainer(strategy, [Losses(report)], options, use_distributed_sampler=False)
    trainer.fit(module, loader(16, 8), loader(8, 4, 5))
    if kind is Counting:
        trainer.predict(module, loader(8, 4, 5))
    return report.losses, dict(SEEN)


class Meeting(Net):
    """Calls collectives in its steps, as lightly's DINO does for its centre."""

    def build(self) -> None:
        self.register_buffer("center", torch.zeros(3))

    def mean(self, tensor: Tensor) -> Tensor:
        """Over the replicas, by hand."""
        if not dist.is_initialized():
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = self.mean(batch[0].sum())  # before the layers: on every stage
        logits, loss = self.logits_and_loss(batch)
        strategy = self.trainer.strategy
        strategy.barrier()
        self.center = 0.9 * self.center + 0.1 * self.mean(logits.detach().mean(0))
        shown = logits.mean()
        if dist.is_initialized():
            shown = all_reduce(shown) / dist.get_world_size()  # with gradients
        gathered = self.all_gather(logits.detach().mean())
        assert isinstance(gathered, Tensor)
        scale = float(strategy.broadcast(gathered.sum()))
        assert strategy.reduce_boolean_decision(True)
        return loss + (self.center * logits).mean() + shown.pow(2) + 0.01 * scale * count * logits.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.mean(self.logits_and_loss(batch)[1]))

    def on_validation_epoch_end(self) -> None:
        dist.is_initialized() and dist.barrier()


class MeetingInside(Net):
    """Calls a collective between the layers, on what a later stage has not computed itself."""

    def logits(self, inputs: Tensor) -> Tensor:
        hidden = self.net[:2](inputs)
        shift = hidden.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(shift)
            shift /= dist.get_world_size()
        return self.net[2:](hidden - shift)


@pytest.mark.parametrize(("kind", "layout"), [
    (MeetingInside, "pipeline, replicas"),
    (Counting, "fully sharded"), (Counting, "async"), (Counting, "tensor, replicas"),
    (Meeting, "pipeline, replicas"), (Meeting, "async"), (Meeting, "tensor, replicas"),
    *thorough((Counting, "zbv"), (Meeting, "three stages"), (Meeting, "fully sharded"), (Meeting, "zbv")),
])  # fmt: skip
def test_a_step_sees_the_ranks_of_the_data_axis_and_has_ddp_s_losses(launch: Any, kind: type[Net], layout: str) -> None:
    """It takes its share by the rank, or calls collectives, which are over the replicas."""
    strategy, options, processes, replicas = LAYOUTS[layout]
    expected = launch(fit, replicas, kind, *(("single", {}) if replicas == 1 else ("ddp", {})))
    peers = launch(fit, processes, kind, strategy, options, timeout=LIMIT)
    (losses, _), (theirs, _) = peers[0], expected[0]
    if strategy == "async":
        losses, theirs = losses[:1], theirs[:1]  # the others come by late gradients
    assert losses == pytest.approx(theirs, rel=1e-12)
    for rank, (_, seen) in enumerate(peers if kind is Counting else ()):
        place = rank % replicas if strategy != "tensor" else rank // 2  # tensor ranks run fastest
        assert seen.pop("on_train_batch_end") == (processes, rank, rank, rank == 0, processes, rank)
        assert seen == dict.fromkeys(seen, (replicas, place, place, place == 0, replicas, place))
        assert len(seen) == 5
