"""The study's page: what was asked, what came out, and what did not, written from the runs that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from textwrap import fill

from tools import NOT_SEARCHED
from tools.study import clock, picture, tables
from tools.study.arms import EXTENSIONS, RATES, TIE, Arm, Setting
from tools.study.findings import findings
from tools.study.rows import Row, progress, rows
from tools.study.store import FILE, Store
from tools.study.studies import Study
from tools.study.task import Words

PAGE = "index.md"
_WIDTH = 120

_QUESTION = """\
An asynchronous pipeline keeps every stage busy, by applying gradients that are late. What does that cost in quality, at
equal updates and equal data, and which rule costs least? Every arm trains the same model on the same batches; arms
differ in what a microbatch's forward reads on each stage, and in nothing else. The rules are those of
`AsyncPipelineStrategy`, computed in one process by `tools.study.delayed`, whose numbers are the strategy's."""

_SYNCHRONOUS = """\
- **synchronous**: no late gradients, so its losses depend neither on stages nor on microbatches; only its time does.
- **m=16 and so on**: asynchronous 1F1B with as many microbatches an update, weights stashed. *error feedback* and
  *second order* are corrections of what forwards read (`lightning_parallel/pipeline/staleness.py`); without either
  name, none."""
_PIPEDREAM = "- **PipeDream, m=1**: an update after each microbatch, which is the whole batch here; weights stashed."
_2BW = "- **2BW**: every forward reads the weights of one update ago, on all stages."
_V = """\
- **V-Half, V-Min**: two chunks of layers a stage, in a V, and an update for each chunk, never flushed
  (`lightning_parallel/schedules/asynchronous_v.py`)."""
_LATEST = """\
- **latest, m=1 and so on**: without stash: backwards use the newest weights. With at least as many microbatches as
  stages this is the rule of PACI (arXiv:2606.07881): an update's own accumulation bounds how far versions drift."""

_OPTIMIZERS = {
    "adamw": "AdamW: betas 0.9, 0.95.",
    "muon": "Muon: the blocks' matrices by torch.optim.Muon, momentum 0.95, its rate adjusted to AdamW's, and all else "
    "by AdamW.",
    "soap": "SOAP (arXiv:2409.11321, as pytorch_optimizer has it): the blocks' matrices by Adam in the eigenbasis of "
    "their gradients' covariances, found anew every 10 updates, which is basis rotation (arXiv:2602.03515); all else "
    "by Adam; betas 0.9, 0.95.",
    "nadamw": "NAdam: decoupled weight decay, betas 0.9, 0.95, momentum_decay {decay:g}.",
}

_DISTANCES = "Distances of the final loss to the synchronous arm's at equal updates, the mean over the seeds:"

_CHOSEN_ON_IT = """\
- Rates are a factor of two apart, and chosen by the validation loss that is reported, on the seeds that are reported.
  The choice is alike for every arm, the synchronous one included, so gaps compare like with like; the losses themselves
  are lower than on data that nothing was chosen on. Differences of some tenths of a percent can come from the grid of
  rates."""

_CHOSEN_APART = """\
- Rates are a factor of two apart. Differences of some tenths of a percent can come from that grid."""

_NOT_SHOWN = """\
- One small model, {limits}, few updates. How a gap goes on with size and with the length of training is
  not known from here. The rate's warm-up is long, a fifth of the updates, for all arms.
- Other settings (betas, weight decay, warm-up, clipping, batch) are the same for all arms and were tuned for none in
  this study. That the warm-up is long was found to help asynchronous arms most, on this model.
- Few seeds: a standard deviation of three numbers is a rough guess, and so is a mean. Rounding alone moves a run: two
  of one rule and one seed, whose sums were in another order, ended 0.5 % apart.
- Time is simulated: stages of equal cost, microbatches as efficient as whole batches however small, no time for
  validation, the optimizer or a correction. What real pipelines lose on top was measured with stages that sleep, on
  processes of one machine.
- The rate falls until the last update, and the synchronous loss is reached late under it. Who wanted that loss and no
  lower one would plan shorter runs. A ratio on the clock is one of these schedules.
- Memory is counted in copies of weights. Activations are alike in all arms by asynchronous 1F1B, p - s microbatches on
  stage s, and smaller where a batch is cut into more of them."""


def write(directory: Path, study: Study, setting: Setting, plan: Sequence[Arm], seeds: int, store: Store) -> None:
    """The page and its pictures; what has not been run is left out, and counted."""
    words = study.task.words
    directory.mkdir(parents=True, exist_ok=True)
    found = rows(setting, plan, seeds, store)
    names = dict.fromkeys(arm.optimizer for arm in plan)
    optimizers = [name for name in names if Arm(name) in found and isfinite(found[Arm(name)].mean)]
    found = {arm: row for arm, row in found.items() if arm.optimizer in optimizers}
    stages = sorted({arm.stages for arm in plan if not arm.synchronous}, reverse=True)
    begun = {p: [name for name in optimizers if tables.of(found, name, p)] for p in stages}
    shown = "\n".join(fill(f"- {line}", _WIDTH, subsequent_indent="  ") for line in findings(found, optimizers, stages))
    parts = [f"# {study.title}", _QUESTION, _state(setting, plan, seeds, store, found)]
    parts += [f"    python -m tools.study {study.name}"]
    parts += ["## What this shows", *([_DISTANCES, shown] if shown else ["Nothing yet: too few runs are done."])]
    chosen = _CHOSEN_APART if setting.choice else _CHOSEN_ON_IT
    parts += ["## What this does not show", f"{_NOT_SHOWN.format(limits=words.limits)}\n{chosen}"]
    deepest = next((p for p in stages if begun[p]), None)
    if deepest is not None:
        picture.gaps(found, optimizers, directory / "gaps.png")
        picture.curves(found, begun[deepest], deepest, words.unit, directory / "curves.png")
        parts += ["## Pictures", "![Distance of each arm's final loss to the synchronous arm's](gaps.png)"]
        parts += ["A dot for each seed, a bar at their mean."]
        parts += [f"![Loss over updates and over simulated time, {deepest} stages](curves.png)"]
    parts += ["## Results", tables.READING.format(unit=words.unit)]
    parts += [tables.results(found, name, p).markdown() for p in stages for name in begun[p]]
    parts += ["## Tried, and left", study.tried] if study.tried else []
    parts += ["## Arms", _arms(plan), "## Setting", *_setting(words, setting, plan, seeds, store)]
    parts += ["## Rates", _rates(words, setting, plan), *(tables.rates(found, name).markdown() for name in optimizers)]
    parts += ["## Simulated time", _time()]
    (directory / PAGE).write_text("\n\n".join([NOT_SEARCHED, *parts]) + "\n")


def _state(setting: Setting, plan: Sequence[Arm], seeds: int, store: Store, found: Mapping[Arm, Row]) -> str:
    done, total = progress(setting, plan, seeds, store)
    if done == total:
        return f"All {total} runs are done; each is a line of [{FILE}]({FILE})."
    left_out: Counter[str] = Counter()
    for arm in plan:
        if arm not in found:
            left_out[f"{tables.NAMES[arm.optimizer]} {'synchronous' if arm.synchronous else f'p={arm.stages}'}"] += 1
    missing = ", ".join(f"{name} ({count})" for name, count in left_out.items()) or "none"
    return fill(
        f"**{done} of {total} runs done** (more are needed where the best rate turns out to be at an edge); each is a "
        f"line of [{FILE}]({FILE}). Arms left out, since their rate or the synchronous arm's has not been chosen yet: "
        f"{missing}. Where others have fewer than {seeds} seeds, the tables say so.",
        _WIDTH,
    )


def _arms(plan: Sequence[Arm]) -> str:
    late = [arm for arm in plan if not arm.synchronous]
    lines = [_SYNCHRONOUS]
    lines += [_PIPEDREAM] if any(arm.microbatches == 1 and arm.weights == "stash" for arm in late) else []
    lines += [_2BW] if any(arm.weights == "2bw" for arm in late) else []
    lines += [_LATEST] if any(arm.weights == "latest" for arm in late) else []
    lines += [_V] if any(arm.schedule != "1f1b" for arm in late) else []
    return "\n".join(lines)


def _setting(words: Words, setting: Setting, plan: Sequence[Arm], seeds: int, store: Store) -> list[str]:
    mine = [result for run, result in store.results.items() if run.setting == setting]
    used_names = [field.name for field in fields(setting) if field.name not in words.unused]
    values = ", ".join(f"{name} {getattr(setting, name)}" for name in used_names)
    versions = ", ".join(sorted({str(result["torch"]) for result in mine}))
    used = {arm.optimizer for arm in plan}
    optimizers = " ".join(text for name, text in _OPTIMIZERS.items() if name in used)
    optimizers = optimizers.format(decay=200 / setting.updates)
    hours = sum(result["seconds"] for result in mine) / 3600
    return [
        fill(f"{words.model}, float32 on CPUs, a thread a run: {values}.", _WIDTH),
        fill(
            f"{words.drawn} by the seed, which initialises the model too; {seeds} seeds, the same for every arm; "
            f"{setting.windows} fixed {words.samples}, {words.held_out}, for validation. The rate rises linearly over "
            f"{setting.warmup} updates, and then falls as half a cosine to {setting.floor:g} of its peak. Gradients "
            f"are clipped to a norm of {setting.clip:g} block by block, what comes before the blocks with the first "
            f"and what comes after them with the last, so that all arms clip alike. {optimizers} torch {versions}; "
            f"{hours:.1f} hours of one thread.",
            _WIDTH,
        ),
    ]


def _rates(words: Words, setting: Setting, plan: Sequence[Arm]) -> str:
    optimizers = {arm.optimizer for arm in plan}
    given = "; ".join(
        f"{name} {', '.join(f'{rate:g}' for rate in rates)}" for name, rates in RATES.items() if name in optimizers
    )
    return fill(
        f"For each arm, on the first seed, by the final loss on {_chosen_on(words, setting)}, the synchronous one "
        f"included: {given}. As long "
        f"as the best was the least or the greatest tried, the next by a factor of two was tried too, {EXTENSIONS} "
        f"more at most. The other seeds ran at the best, and at each that was within {TIE:.0%} of it; of those the "
        f"lowest mean over the seeds chose the arm's rate, in bold.",
        _WIDTH,
    )


def _chosen_on(words: Words, setting: Setting) -> str:
    return f"{setting.choice} {words.samples} {words.apart}" if setting.choice else "validation"


def _time() -> str:
    """How time was simulated, with the figures that went in."""
    names = dict(zip(clock.MEASURED, (*clock.NAMES.values(), "asynchronous", "V-Half", "V-Min"), strict=True))
    shares = "; ".join(
        f"{names[schedule]} {', '.join(f'{share:.3f} (p={p}, m={m})' for (p, m), share in measured.items())}"
        for schedule, measured in clock.MEASURED.items()
    )
    return fill(
        f"In units of a batch's forward and backward on one stage, an update takes (m + p - 1) / m by 1F1B and 1 "
        f"asynchronously. ZB-V is simulated; its stages go on to the next batch by themselves. The asynchronous "
        f"pipeline is filled once, (p - 1) / m; in a V its last stage waits for each batch, as is "
        f"simulated. Real pipelines are slower. In the project's "
        f"`python -m tools.bench pipeline`, with stages that sleep, inside `Trainer.fit` and side by side in one "
        f"run, stages computed this share of the time: {shares}. Other p and m were not measured. There the theory's "
        f"share is reduced as at a measured size: the one that lost least for a synchronous schedule, the one that "
        f"lost most for an asynchronous one. A stage of the study's model may be too small for the two chunks of ZB-V "
        f"and the other schedules in a V; on the clock it stands for a deeper model's.",
        _WIDTH,
    )
