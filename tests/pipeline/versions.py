"""Which weights the asynchronous schedule reads, by a formula; and how many copies of them are held."""

from __future__ import annotations

from lightning_parallel.pipeline.weights import WeightVersions


def copies_held(weights: WeightVersions) -> int:
    """The copies of a stage's weights that are held besides its parameters."""
    held = [version for version in weights._versions() if version.copied]
    return min(1, len(held)) if weights._stashing == "latest" else len(held)  # its versions share one


def version(stages: int, stage: int, microbatches: int, microbatch: int, extra_in_flight: int = 0) -> int:
    """The updates that `stage` has done when the asynchronous schedule runs its forward of `microbatch`.

    For a steady number of `microbatches` per update and no drain so far; derived in `AsyncOneFOneB`.
    """
    return max(0, (microbatch - (stages - 1 - stage) * (1 + extra_in_flight)) // microbatches)
