"""Watching who reads a divided parameter keeps nothing of the step."""

from __future__ import annotations

import gc
from weakref import ref

import torch
from torch import nn

from lightning_parallel.checks.reads_of_shards import ReadsOfShards


def test_a_step_that_was_watched_is_freed_at_once() -> None:
    """Not by a garbage collection, which may be long in coming: until then all of its activations would stay."""
    module = nn.Linear(8, 8)

    def step() -> ref[torch.UntypedStorage]:
        output = module(torch.ones(2, 8))
        return ref(output.untyped_storage())

    gc.disable()
    try:
        with ReadsOfShards(module, ["weight"]):
            memory = step()
        assert memory() is None
    finally:
        gc.enable()
