"""Which weights the asynchronous schedule reads, by a formula."""

from __future__ import annotations


def version(stages: int, stage: int, microbatches: int, microbatch: int, extra_in_flight: int = 0) -> int:
    """The updates that `stage` has done when the asynchronous schedule runs its forward of `microbatch`.

    For a steady number of `microbatches` per update and no drain so far; derived in `AsyncOneFOneB`.
    """
    return max(0, (microbatch - (stages - 1 - stage) * (1 + extra_in_flight)) // microbatches)
