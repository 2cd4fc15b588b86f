"""One run: the model cut into stages, late gradients by :class:`Delayed`, validations on the way.

A microbatch's forward may read other versions of the stages' weights than the next one's, but neighbours mostly read
the same: those go through a stage together, as one call. The gradients are those of one microbatch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from recipes.models.muon import MuonAdamW
from recipes.models.optimizer import warmup_cosine
from tools.study.arms import Run, Setting
from tools.study.delayed import Delayed, Reading
from tools.study.task import Chain, Task

_CPU = torch.device("cpu")
_VALIDATED = 128  # samples at a time


class Part(nn.Module):
    """Some consecutive blocks of a model; with what comes before the first of them, after the last, or both."""

    def __init__(self, model: Chain, blocks: range) -> None:
        super().__init__()
        self.before = model.before if blocks.start == 0 else None
        self.blocks = nn.ModuleDict({str(index): model.blocks[index] for index in blocks})
        self.after = model.after if blocks.stop == len(model.blocks) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.after is None else self.after(x)


def parts(task: Task, setting: Setting, stages: int, seed: int) -> list[Part]:
    """A task's model, initialised by ``seed``, cut into ``stages`` of as many blocks each."""
    torch.manual_seed(seed)
    model = task.chain(setting)
    share = setting.layers // stages
    return [Part(model, range(s * share, (s + 1) * share)) for s in range(stages)]


def optimizer_of(name: str, parameters: Mapping[str, nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    """That of one stage. The share of Muon and SOAP is the blocks' matrices; AdamW has the rest, at the same rate.

    The rate is set at every update.
    """
    decay = setting.weight_decay
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), 0.0, (0.9, 0.95), weight_decay=decay, fused=True)
    if name == "nadamw":
        # Its momentum warms up over the run; torch's default, 0.004, is for 50 000 updates.
        return torch.optim.NAdam(
            parameters.values(),
            0.0,
            (0.9, 0.95),
            weight_decay=decay,
            momentum_decay=200 / setting.updates,
            decoupled_weight_decay=True,
            foreach=True,
        )
    if name not in ("muon", "soap"):
        raise ValueError(f"optimizer={name!r} is not known: use 'adamw', 'muon', 'nadamw' or 'soap'")
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for key, parameter in parameters.items():
        groups[parameter.dim() == 2 and key.startswith("blocks.")].append(parameter)
    if name == "soap":
        from pytorch_optimizer import SOAP  # here: its package takes seconds to import

        of_both: list[dict[str, Any]] = [{"params": groups[True]}, {"params": groups[False], "max_precondition_dim": 1}]
        return SOAP(of_both, 3e-3, (0.9, 0.95), weight_decay=decay)  # above that dimension it is Adam
    both = [{"params": groups[True], "muon": True}, {"params": groups[False], "muon": False, "fused": True}]
    return MuonAdamW(both, 0.0, (0.9, 0.95), weight_decay=decay)


def clipped_together(setting: Setting, parameters: Mapping[str, nn.Parameter]) -> list[list[nn.Parameter]]:
    """A stage's parameters block by block, for :attr:`Setting.clip`."""
    groups: dict[int, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        kind, place, *_ = name.split(".")
        block = int(place) if kind == "blocks" else 0 if kind == "before" else setting.layers - 1
        groups.setdefault(block, []).append(parameter)
    return list(groups.values())


def forward(chain: Sequence[Part], readings: Sequence[Reading], x: Tensor) -> Tensor:
    """Logits of a batch, each microbatch by the weights that it reads.

    Args:
        x: [batch, ...]; a microbatch is as many neighbours as there are samples for each of ``readings``.
    """
    samples = len(x) // len(readings)
    for stage, part in enumerate(chain):
        outputs, begin = [], 0
        for _, group in groupby(readings, key=lambda reading: id(reading.stages[stage])):
            together = list(group)
            end = begin + samples * len(together)
            leaves = dict(together[0].stages[stage])
            outputs.append(functional_call(part, leaves, (x[begin:end],), tie_weights=False))
            begin = end
        x = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [batch, ..., classes] and targets [batch, ...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def execute(run: Run, task: Task, device: torch.device = _CPU) -> dict[str, Any]:
    """Train and validate.

    Args:
        device: on which the model is trained.

    Returns:
        ``curve``: [updates, validation loss] pairs, of the parameters themselves; ``final``: the last; ``choice``:
        that on the data by which rates are chosen; and ``final_read``: the validation loss of the weights that the
        next microbatch's forward would read. None where it was not finite.
    """
    setting, arm = run.setting, run.arm
    torch.set_flush_denormal(True)  # Adam's second moments get there, and the processor slows down tenfold
    chain = [part.to(device) for part in parts(task, setting, arm.chunks, run.seed)]
    names = [dict(part.named_parameters()) for part in chain]
    late = Delayed(names, weights=arm.weights, correction=arm.correction, schedule=arm.schedule)
    optimizers = [optimizer_of(arm.optimizer, stage, setting) for stage in names]
    blocks = [clipped_together(setting, stage) for stage in names]

    def step(stage: int) -> None:
        for block in blocks[stage]:
            nn.utils.clip_grad_norm_(block, setting.clip, foreach=True)
        optimizers[stage].step()

    validation = task.held_out(setting, "val", setting.windows)

    def validate(weights: Sequence[Mapping[str, Tensor]], samples: tuple[Tensor, Tensor] = validation) -> float:
        inputs, targets = samples
        total = 0.0
        with torch.inference_mode():
            for begin in range(0, len(inputs), _VALIDATED):
                x, y = (each[begin : begin + _VALIDATED].to(device) for each in (inputs, targets))
                for part, leaves in zip(chain, weights, strict=True):
                    x = functional_call(part, dict(leaves), (x,), tie_weights=False)
                total += float(loss_of(x, y)) * len(y)
        return total / len(inputs)

    curve: list[list[float]] = []
    for update, (x, y) in enumerate(task.batches(setting, run.seed)):
        factor = warmup_cosine(update, warmup_steps=setting.warmup, total_steps=setting.updates, floor=setting.floor)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = run.rate * factor
        readings = late.feed(arm.microbatches)
        groups = [[each] for each in readings] if arm.weights == "latest" else [readings]  # others need no reading
        losses = []
        for some, inputs, targets in zip(groups, x.chunk(len(groups)), y.chunk(len(groups)), strict=True):
            losses.append(loss_of(forward(chain, some, inputs.to(device)), targets.to(device)))
            late.backward(some[0], losses[-1], weight=1 / len(groups))
        if not all(math.isfinite(loss.item()) for loss in losses):
            break
        late.update(step)
        if (update + 1) % setting.every == 0 or update + 1 == setting.updates:
            curve.append([update + 1, validate(names)])
    else:
        final = curve[-1][1]
        choice = final
        if setting.choice:
            choice = validate(names, task.held_out(setting, "test", setting.choice))
        read = validate(late.feed(1)[0].stages)
        return {"curve": curve, "final": _finite(final), "choice": _finite(choice), "final_read": _finite(read)}
    return {"curve": curve, "final": None, "choice": None, "final_read": None}


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
