"""One run that is preempted, killed, and moved through three layouts, beside one that is left alone.

::

    python -m tools.moves

It draws the losses of both, and prints how far apart they are.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from recipes import ROOT
from recipes.logs import read
from recipes.processes import REQUEUE

Losses = dict[int, float]  # by step


@dataclass(frozen=True)
class Leg:
    """A part of the run.

    Attributes:
        strategy: of the recipe.
        until: the share of the steps after which the run is disturbed; 1 for the last leg.
        signal: that it gets.
    """

    strategy: str
    until: float = 1
    signal: signal.Signals | None = None

    @property
    def end(self) -> str:
        """How the leg ends, for the picture."""
        names = {signal.SIGTERM: "preempted", signal.SIGKILL: "killed", None: "done"}
        return f"{self.strategy}: {names[self.signal]}"


LEGS = (
    Leg("pipeline_1f1b", 0.3, signal.SIGTERM),
    Leg("tensor_parallel", 0.7, signal.SIGKILL),
    Leg("ddp"),
)


def run(folder: Path, steps: int, legs: Sequence[Leg], options: Sequence[str] = ()) -> list[int]:
    """Run the legs in one folder, each from the newest checkpoint there; the step at which each was disturbed.

    Raises:
        RuntimeError: a leg ended otherwise than it should have.
    """
    ends: list[int] = []
    for leg in legs:
        log = folder.with_suffix(".log")
        with log.open("a") as output:
            program = subprocess.Popen(_command(folder, steps, leg, options), cwd=ROOT, stdout=output, stderr=output)
            try:
                while leg.signal is not None and _last(folder) < leg.until * steps and program.poll() is None:
                    time.sleep(0.1)
                ends.append(_last(folder) + 1)
                if leg.signal is not None:
                    program.send_signal(leg.signal)
                code = program.wait()
            finally:
                program.kill()
        expected = {signal.SIGTERM: REQUEUE, signal.SIGKILL: -signal.SIGKILL, None: 0}[leg.signal]
        if code != expected:
            raise RuntimeError(f"strategy={leg.strategy} ended with {code}, not {expected}: see {log}")
    return [*ends[:-1], _last(folder) + 1]


def _command(folder: Path, steps: int, leg: Leg, options: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "recipes.train", f"strategy={leg.strategy}", f"hydra.run.dir={folder}", "resume=auto",
        f"trainer.max_steps={steps}", f"trainer.val_check_interval={max(1, steps // 12)}",
        "trainer.log_every_n_steps=1", "+logger.csv.flush_logs_every_n_steps=1", "model.dropout=0",
        "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "print_config=false", *options,
    ]  # fmt: skip


def losses(folder: Path) -> Losses:
    """The training losses that a run has logged."""
    rows = read(folder / "csv")
    return {int(row["step"]): float(row["train_loss"]) for row in rows if row.get("train_loss")}


def _last(folder: Path) -> int:
    return max(losses(folder), default=-1)


def draw(path: Path, whole: Losses, moved: Losses, ends: Sequence[int], legs: Sequence[Leg]) -> None:
    """Both curves, one over the other, and how far they are apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([*whole], [*whole.values()], color="#999999", linewidth=4, label="left alone, pipeline_1f1b")
    begin = 0
    for leg, end, colour in zip(legs, ends, ("#0072B2", "#D55E00", "#009E73"), strict=True):
        part = {step: loss for step, loss in moved.items() if begin <= step < end}
        above.plot([*part], [*part.values()], color=colour, linewidth=1.2, label=f"{leg.end} at step {end}")
        for panel in (above, below):
            panel.axvline(end, color=colour, linewidth=0.8, linestyle=":")
        begin = end
    below.plot([*moved], [abs(moved[step] - whole[step]) for step in moved], ".", color="black", markersize=3)
    below.ticklabel_format(axis="y", scilimits=(0, 0))
    above.set_ylabel("training loss")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend(loc="upper right", framealpha=1, edgecolor="white")
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.moves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/moves.png"), help="the picture")
    parser.add_argument("options", nargs="*", help="of recipes.train, for all runs")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="moves-") as scratch:
        alone, moving = Path(scratch) / "alone", Path(scratch) / "moved"
        run(alone, given.steps, [Leg(LEGS[0].strategy)], given.options)
        ends = run(moving, given.steps, LEGS, given.options)
        whole, moved = losses(alone), losses(moving)
    if whole.keys() != moved.keys():
        raise RuntimeError(f"The runs have logged {len(whole)} and {len(moved)} steps.")
    apart = [abs(moved[step] - whole[step]) for step in whole]
    print(f"{', '.join(f'{leg.end} at step {end}' for leg, end in zip(LEGS, ends, strict=True))}.")
    print(f"Losses of {len(whole)} steps differ by {max(apart):.1e} at most, {median(apart):.1e} in the median.")
    draw(given.output, whole, moved, ends, LEGS)
    print(f"Drawn: {given.output}")


if __name__ == "__main__":
    main()
