"""Compares a layout with one process, on a module of the user's own.

    check.py          compares both, once more where they differ
    runs.py           trains them
    evidence.py       notes what a run has come to
    differences.py    compares that
    rounding.py       finds how far rounding may move a number
    units.py          notes what modules get and return in one batch
    beginning.py      finds the first of it that differs
    timing.py         runs a layout in processes of its own, and says what a step takes
    held.py           counts the bytes that a rank holds

It trains by Lightning's public Trainer. Of how a layout works it knows which part of a parameter a rank holds, into how
many microbatches its share of a batch is divided, and whether a layer runs on this rank now.
"""
