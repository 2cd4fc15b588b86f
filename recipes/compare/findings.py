"""What the figures show, in sentences that they decide: whatever a figure says is written, not what was expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from recipes.compare.rows import Row

MIB = 2**20
_CALM = 0.1  # share of time without a core that step times can still be compared at
SYNCHRONOUS = ("pipeline_sync", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zbv")
Rows = Mapping[str, Row]


def findings(rows: Sequence[Row]) -> list[str]:
    """For each pair that was measured, what tells the two apart."""
    by_name = {row.strategy: row for row in rows if row.error is None}
    parts = (
        _load,
        _fastest,
        _replicas_and_processes,
        _sharded_and_replicated,
        _naive_and_gpipe,
        _gpipe_and_1f1b,
        _fewer_bubbles,
        _synchronous_and_asynchronous,
        _same_losses,
        _balance,
    )
    found = [line for part in parts for line in part(by_name)]
    return found or ["Too few strategies were measured to compare them."]


def _load(rows: Rows) -> Iterator[str]:
    queued = {name: row.queued for name, row in rows.items() if row.queued is not None}
    if queued and max(queued.values()) > _CALM:
        worst = max(queued, key=lambda name: queued[name])
        yield (
            f"The cores were wanted by more than could run: threads were ready and had none for "
            f"{min(queued.values()):.0%} to {queued[worst]:.0%} ({worst}) of the time. If other programs ran too, step "
            f"times tell little; messages and losses are not affected."
        )


def _fastest(rows: Rows) -> Iterator[str]:
    others = [row for name, row in rows.items() if name != "single"]
    if "single" in rows and others:
        best = min(others, key=lambda row: row.step)
        yield (
            f"The fastest of those over {best.devices} devices is {best.strategy}: {_times(rows['single'], best)} one "
            f"process on one device."
        )


def _replicas_and_processes(rows: Rows) -> Iterator[str]:
    """Replicas in one process against a process for each."""
    if "dp" not in rows:
        return
    dp = rows["dp"]
    (measured,) = dp.ranks
    phases = measured["phases"]
    alone = sum(phases.get(phase, 0.0) for phase in ("scatter", "replicate"))
    yield (
        f"Each step of dp makes its {dp.devices} replicas anew: {_ms(phases['replicate'])} to replicate, {_ms(alone)} "
        f"with scattering the batch, {alone / fmean(measured['seconds']):.1%} of the mean step."
    )
    if "single" in rows:
        yield f"{dp.devices} replicas in one process: a step of dp is {_times(rows['single'], dp)} that of one model."
    if "ddp" in rows:
        ddp = rows["ddp"]
        threads = [rank["thread"] for rank in ddp.ranks]
        computing, blocked, queued = (fmean(t[key] for t in threads) for key in ("computing", "blocked", "queued"))
        yield (
            f"ddp, with a process for each replica, is {_times(dp, ddp)} dp ({_ms(ddp.step)} against "
            f"{_ms(dp.step)} a step). Its processes compute {computing:.0%} of the time, wait for each other's "
            f"messages {blocked:.0%}, and for a core {queued:.0%}."
        )


def _sharded_and_replicated(rows: Rows) -> Iterator[str]:
    """Memory against traffic."""
    if not {"ddp", "fsdp"} <= rows.keys():
        return
    ddp, fsdp = rows["ddp"], rows["fsdp"]
    kept, whole = sum(fsdp.held.values()), sum(ddp.held.values())
    yield (
        f"fsdp keeps {kept / MIB:.2f} MiB of parameters, gradients and optimizer state on a rank, ddp "
        f"{whole / MIB:.2f} MiB: {kept / whole:.0%}. It sends {fsdp.total_sent / MIB:.2f} MiB a step from each rank, "
        f"ddp {ddp.total_sent / MIB:.2f} MiB: {fsdp.total_sent / ddp.total_sent:.2f} times as much. A step is "
        f"{_times(ddp, fsdp)} ddp's."
    )
    more = (fmean(fsdp.peaks) - fmean(ddp.peaks)) / MIB
    yield (
        f"At the peak, activations and buffers included, a rank of fsdp takes {abs(more):.1f} MiB "
        f"{'more' if more > 0 else 'less'} than one of ddp."
    )


def _naive_and_gpipe(rows: Rows) -> Iterator[str]:
    if {"pipeline_naive", "pipeline_sync"} <= rows.keys():
        naive, gpipe = rows["pipeline_naive"], rows["pipeline_sync"]
        yield (
            f"The naive split leaves its stages without compute {_percent(naive.bubble)} of the time (by theory "
            f"{_percent(naive.theory)}), GPipe {_percent(gpipe.bubble)} (by theory {_percent(gpipe.theory)}); a step "
            f"of GPipe is {_times(naive, gpipe)} one of the naive split."
        )


def _gpipe_and_1f1b(rows: Rows) -> Iterator[str]:
    if {"pipeline_sync", "pipeline_1f1b"} <= rows.keys():
        gpipe, other = rows["pipeline_sync"], rows["pipeline_1f1b"]
        yield (
            f"1F1B, whose bubble is GPipe's by theory, is {_times(gpipe, other)} GPipe; its fullest rank peaks at "
            f"{other.peak / MIB:.1f} MiB, GPipe's at {gpipe.peak / MIB:.1f} MiB."
        )


def _fewer_bubbles(rows: Rows) -> Iterator[str]:
    """Schedules with several chunks a stage, beside 1F1B."""
    if "pipeline_1f1b" not in rows:
        return
    plain = rows["pipeline_1f1b"]
    for name in ("pipeline_interleaved", "pipeline_zbv"):
        if name in rows:
            row = rows[name]
            yield (
                f"{name} is {_times(plain, row)} 1F1B: its stages are without compute {_percent(row.bubble)} of the "
                f"time (by theory {_percent(row.theory)}), 1F1B's {_percent(plain.bubble)} "
                f"({_percent(plain.theory)}). It sends {row.total_sent / plain.total_sent:.1f} times as much, and its "
                f"fullest rank peaks at {row.peak / MIB:.1f} MiB, 1F1B's at {plain.peak / MIB:.1f} MiB."
            )


def _synchronous_and_asynchronous(rows: Rows) -> Iterator[str]:
    """Speed, beside the fastest synchronous schedule, and what it costs in loss."""
    synchronous = [rows[name] for name in SYNCHRONOUS if name in rows]
    if "pipeline_async" not in rows or not synchronous:
        return
    due = min(synchronous, key=lambda row: row.step)
    late = rows["pipeline_async"]
    yield (
        f"Without a flush, pipeline_async is {_times(due, late)} {due.strategy} ({_ms(late.step)} against "
        f"{_ms(due.step)} a step); its stages are without compute {_percent(late.bubble)} of the time, against "
        f"{_percent(due.bubble)}."
    )
    if late.loss is not None and due.loss is not None:
        higher = late.loss - due.loss
        difference = f"{abs(higher):.4f} {'higher' if higher > 0 else 'lower'}" if higher else "the same"
        yield (
            f"Its gradients are late: after as many updates the loss is {late.loss:.4f}, and {due.loss:.4f} under "
            f"{due.strategy}: {difference}."
        )


def _same_losses(rows: Rows) -> Iterator[str]:
    one = rows["single"].loss if "single" in rows else None
    if one is None:
        return
    off = {
        name: abs(row.loss - one)
        for name, row in rows.items()
        if row.loss is not None and name not in ("single", "pipeline_async")
    }
    if off:
        name = max(off, key=lambda name: off[name])
        yield f"The synchronous strategies' losses are within {off[name]:.1e} of one process's {one:.4f} ({name})."


def _balance(rows: Rows) -> Iterator[str]:
    several = [row for row in rows.values() if len(row.peaks) > 1]
    if several:
        worst = max(several, key=lambda row: row.imbalance)
        yield f"Memory is least even under {worst.strategy}: the fullest rank has {worst.imbalance:.2f} x the mean."


def _times(before: Row, after: Row) -> str:
    """How a step of ``after`` compares: words in front of the name of ``before``."""
    ratio = before.step / after.step
    if abs(ratio - 1) < 0.03:
        return "within 3 % of"
    return f"{ratio:.2f} x as fast as"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"
