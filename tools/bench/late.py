"""The study's rule for late gradients on a model of a size that a GPU makes possible: two arms, without processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from recipes.tables import Cell, Table
from tools.bench.report import device_name
from tools.study import train
from tools.study.arms import Arm, Run, Setting
from tools.study.text import Text, headers


@dataclass(frozen=True)
class Sizes:
    """What is compared, and where. Each arm trains once, with one rate and one seed: that shows whether the gap between
    them grows with the model, and is no study. The rate is the middle one of those that the study tries with Muon."""

    device: str
    setting: Setting
    arms: tuple[Arm, ...] = (Arm("muon"), Arm("muon", 8, 16, "stash", "second_order"))
    rate: float = 0.012


_BIG = Setting(data="", width=1024, heads=16, context=256, batch=32, updates=400, warmup=80, every=100, windows=256)
_SMALL = Setting(data="", width=16, heads=2, context=16, updates=4, warmup=2, every=4, windows=8)
CUDA = Sizes("cuda", _BIG)
QUICK_CUDA = Sizes("cuda", replace(_BIG, updates=8, warmup=2))
QUICK = Sizes("cpu", _SMALL)


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row."""
    task = Text(headers, "headers")
    setting = replace(sizes.setting, data=task.fingerprint())
    torch.set_float32_matmul_precision("high")  # on a GPU: TF32, as such a model would be trained
    count = sum(parameter.numel() for part in train.parts(task, setting, 1, 0) for parameter in part.parameters())
    where = device_name(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"Late gradients, on {where}: a GPT of {count / 1e6:.0f} million parameters, {setting.updates} updates",
        {"arm": "", "validation loss": "", "loss beside synchronous": "", "an update (ms)": ".0f"},
        rows,
        f"Muon, rate {sizes.rate:g}, one seed, C and C++ headers. Validations are in the time.",
    )
    reference: float | None = None
    for arm in sizes.arms:
        begin = time.perf_counter()
        final = train.execute(Run(setting, arm, sizes.rate, 0), task, torch.device(sizes.device))["final"]
        seconds = time.perf_counter() - begin
        what = "synchronous" if arm.synchronous else f"{arm.stages} stages, m={arm.microbatches}, {arm.correction}"
        if arm.synchronous:
            reference = final
        distance = "" if final is None or reference is None else f"{final / reference - 1:+.2%}"
        rows.append(
            [what, "not finite" if final is None else f"{final:.4f}", distance, 1e3 * seconds / setting.updates]
        )
        yield table
