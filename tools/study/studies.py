"""The studies that there are, by name: a task, and which arms train on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from lightning_parallel.pipeline.staleness import Correction
from lightning_parallel.schedules.named import Endless
from recipes.data.sources import stdlib
from tools.study.arms import OPTIMIZERS, STAGES, Arm, Setting, arms
from tools.study.images import Digits
from tools.study.task import Task
from tools.study.text import Text, headers


@dataclass(frozen=True)
class Study:
    """What is compared, and on what.

    Attributes:
        name: of the study, and of its folder.
        title: of its page.
        task: data and model.
        setting: what all arms share; its ``data`` is filled in.
        plan: the arms, in the order in which they run.
        tried: what its page tells of earlier attempts.
    """

    name: str
    title: str
    task: Task
    setting: Setting
    plan: tuple[Arm, ...]
    tried: str = ""


def _on_headers() -> tuple[Arm, ...]:
    """Eight stages, where late gradients cost most, and four with many microbatches. What the study asks first runs
    first."""
    so: Correction = "second_order"
    plan: list[Arm] = [Arm("adamw"), Arm("adamw", 8, 16, "stash", so), Arm("adamw", 8, 16)]
    plan += [Arm("muon"), Arm("muon", 8, 16, "stash", so), Arm("adamw", 8, 8, "stash", so)]
    plan += [Arm("adamw", 4, 16, "stash", so), Arm("muon", 8, 8, "stash", so)]
    plan += [Arm("adamw", 8, 16, "stash", "error_feedback"), Arm("muon", 8, 16)]
    plan += [Arm("adamw", 8, m, "latest") for m in (16, 8)]
    return tuple(plan)


def _of_sixteen_stages() -> tuple[Arm, ...]:
    so: Correction = "second_order"
    plan = [Arm("adamw"), Arm("adamw", 16, 32, "stash", so), Arm("muon"), Arm("muon", 16, 32, "stash", so)]
    return (*plan, Arm("adamw", 16, 16, "stash", so), Arm("adamw", 16, 32), *_in_a_v(8), *_rotated(16))


def _of_thirty_two_stages() -> tuple[Arm, ...]:
    so: Correction = "second_order"
    plan = [arm for name in ("muon", "adamw") for arm in (Arm(name), Arm(name, 32, 64, "stash", so))]
    return (*plan, *_in_a_v(16))


def _rotated(stages: int) -> tuple[Arm, ...]:
    """Error feedback, and another answer to late gradients: Adam in a basis in which they do less harm."""
    m = 2 * stages
    feedback = Arm("adamw", stages, m, "stash", "error_feedback")
    return feedback, Arm("soap"), Arm("soap", stages, m, "stash", "second_order"), Arm("soap", stages, m)


def _in_a_v(stages: int) -> tuple[Arm, ...]:
    """Schedules in a V beside 1F1B on as many stages, which has half as many chunks."""
    shapes: tuple[Endless, ...] = ("vmin", "1f1b", "vhalf")
    names = ("adamw", "muon")
    return tuple(Arm(n, stages, 2 * stages, "stash", "second_order", s) for n, s in product(names, shapes))


def _on_images() -> tuple[Arm, ...]:
    """Eight stages: what is recommended first, then without a correction, then with half as many microbatches."""
    so: Correction = "second_order"
    plan = [arm for name in ("adamw", "muon") for arm in (Arm(name), Arm(name, 8, 16, "stash", so))]
    for m, correction in ((16, None), (8, so), (8, None)):
        plan += [Arm("adamw", 8, m, "stash", correction), Arm("muon", 8, m, "stash", correction)]
    return tuple(plan)


def _recommended_for_eight() -> tuple[Arm, ...]:
    """With both optimizers, synchronous training and what is recommended for eight stages."""
    so: Correction = "second_order"
    return tuple(arm for name in ("muon", "adamw") for arm in (Arm(name), Arm(name, 8, 16, "stash", so)))


# Measured with forerunners of the study; what they found is in its rules.
_TRIED = """\
Before the study, on the same model: AdamW, 8 stages, 1000 updates, one seed, other text of the same kind, a warm-up of
50 updates where nothing else is said. The synchronous loss was 1.959 at rate 0.003, and 1.941 at 0.006.

| forwards read, at rate 0.003 | m=16 | m=8 |
|---|--:|--:|
| the parameters | 2.070 | 2.240 |
| error feedback: one term of the series in `staleness.py` | 1.989 | 2.042 |
| two terms, from the last two updates: a copy more | **1.965** | **1.989** |
| two terms, the second 1.5 times as large | | 1.999 |
| second order, but with b = c up to 0.5 only | 1.982 | 2.002 |
| b = c / (1 - c) up to 0.7, where it is the whole series | 1.990 | 2.056 |
| two terms chosen for stability alone, c u / 2 + c (u - u_earlier) | 1.983 | |

- The first 100 updates synchronous, to spare the early phase: 2.103 at rate 0.006 where second order alone had 2.122.
- A longer warm-up of the rate, 200 updates: 1.902 at rate 0.006 in place of 2.122. The synchronous arm gained too,
  1.901 (at 0.012) in place of 1.941; so all arms have it here.
- Without clipping, then, both were worse: 1.936, and 2.085 (synchronous, at 0.012).

In the study's own setting two terms, c u + c^2 (u - u_earlier), came out as second order does, for one more copy of the
weights: AdamW -0.15 % (m=16) and +0.87 % (m=8) from the synchronous loss, Muon +0.25 and +0.33 %, 8 stages, 3 seeds, by
the same rule for rates. Only for 2BW they were better: 2.050 with AdamW, first seed, where second order had 2.113
and error feedback 2.109. Other b, AdamW, m=8, rate 0.006, first seed: second order 2.037; b = c / (1 + c) 2.056,
b = c / 2 2.067, b = c / (1 - c) up to 0.5 2.065, up to 0.7 2.071.

Why it does what it does: on a quadratic, with momentum 0.9, gradient descent is stable up to a product of rate and
curvature of 38. With c = 0.44 (the first of 8 stages, m=16) that falls to 2.3; error feedback makes it 6.7, second
order 12.5, two terms 13.1, three 18; with c = 0.88 (m=8) it is 1.1, 3.1, 5.7, 6.1 and 5.6. More terms
amplify noise.

After the study: NAdam's mu rises during its runs, from 0.45 to 0.9. With mu = 0.9 from the start, 8 stages, 3 seeds,
at the best of two or three rates on the first, with error feedback at one: synchronous 1.943 (rate 0.012); m=8 with
second order 2.012 (+3.5 %; by seed +2.6, +3.9, +4.0), with error feedback 2.004 (+3.1 %; +3.2, +2.6, +3.6), without a
correction 2.026 (+4.3 %; +4.1, +3.8, +4.9), all at rate 0.006. So a corrected NAdam was hurt by the low mu at the
start. What is left of its gap is explained on the page about late gradients."""

_TRIED_OVER_32_STAGES_ON_IMAGES = """\
AdamW's figure above is one of rates. Those of the synchronous arm were tried down to 0.0015, where the losses by which
rates are chosen tie with 0.003's; the late arm's went down to 0.00075, which it was given. Beyond the plan, the
synchronous arm ran at 0.00075 too: 0.9175, 0.9004 and 0.9007 by seed. Beside those, second order ends +0.35 % above
(+0.30, +0.45, +0.29), and over 16 stages V-Min -0.02 % (-0.04, -0.84, +0.81), V-Half +0.41 % (+0.34, +0.56, +0.35) and
1F1B +0.37 % (+0.25, +0.49, +0.39). The losses by which rates over 32 stages are chosen, of 180 other digits, say the
same: +0.3 %."""

_TRIED_OVER_16_STAGES = """\
Beyond the plan, the synchronous arm ran at rate 0.006 too, which the arms over 8 stages were given: 2.7667, 2.7642 and
2.7773 by seed. Beside those, V-Min ends +0.39 % above (-0.18, +0.51, +0.82), V-Half +0.67 % (-0.12, +1.59, +0.54) and
1F1B +0.65 % (+0.30, +1.46, +0.18)."""

_DIGITS = Digits(shift=1, noise=0.3)
_HEADERS = Text(headers, "the C and C++ headers that torch brings (`tools.study.text.headers`)")
_ALL = (
    Study(
        name="asynchrony",
        title="What late gradients cost",
        task=Text(stdlib, "Python's standard library (`recipes.data.sources.stdlib`)"),
        setting=Setting(data=""),
        plan=tuple(arms(OPTIMIZERS, STAGES)),
        tried=_TRIED,
    ),
    Study(
        name="asynchrony_on_headers",
        title="What late gradients cost on another text",
        task=_HEADERS,
        setting=Setting(data="", choice=512),
        plan=_on_headers(),
    ),
    Study(
        name="asynchrony_16_stages",
        title="What late gradients cost over 16 stages",
        task=_HEADERS,
        setting=Setting(data="", layers=16, batch=32, updates=500, warmup=100, every=25, choice=512),
        plan=_of_sixteen_stages(),
        tried=_TRIED_OVER_16_STAGES,
    ),
    Study(
        name="asynchrony_32_stages",
        title="What late gradients cost over 32 stages",
        task=_HEADERS,
        setting=Setting(data="", layers=32, batch=64, updates=200, warmup=40, every=20, choice=512),
        plan=(*_of_thirty_two_stages(), Arm("soap"), Arm("soap", 32, 64, "stash", "second_order")),
    ),
    Study(
        name="asynchrony_on_images",
        title="What late gradients cost on images",
        task=_DIGITS,
        setting=Setting(data="", batch=32, updates=600, warmup=120, every=30, windows=1800, choice=1800),
        plan=_on_images(),
    ),
    Study(
        name="asynchrony_32_stages_on_images",
        title="What late gradients cost over 32 stages, on images",
        task=_DIGITS,
        setting=Setting(data="", layers=32, batch=64, updates=300, warmup=60, every=15, windows=1800, choice=1800),
        plan=_of_thirty_two_stages(),
        tried=_TRIED_OVER_32_STAGES_ON_IMAGES,
    ),
    Study(
        name="asynchrony_larger",
        title="What late gradients cost a model four times as large",
        task=_HEADERS,
        setting=Setting(data="", width=128, heads=8, choice=512),
        plan=_recommended_for_eight(),
    ),
    Study(
        name="asynchrony_longer",
        title="What late gradients cost in runs four times as long",
        task=_HEADERS,
        setting=Setting(data="", updates=4000, warmup=800, every=100, choice=512),
        plan=_recommended_for_eight(),
    ),
)
STUDIES: Mapping[str, Study] = MappingProxyType({study.name: study for study in _ALL})
