"""Measures how long a unit takes: its forward and backward run on stand-ins, for ``balance="time"``."""

from __future__ import annotations

import time
from functools import partial

import torch

from lightning_parallel.absent.answers import on_stand_ins, stand_in
from lightning_parallel.interception import Invocation
from lightning_parallel.private.torch import tensors_in, tree_map

RUNS = 3  # the fastest counts, after one that warms up


def nanoseconds_of(call: Invocation, device: torch.device) -> int:
    """The time that the forward and the backward of a call take on a device, in nanoseconds: the shortest of ``RUNS``.
    The module's parameters, and the arguments, are absent."""
    here = partial(stand_in, device=device, trains=True)
    times: list[int] = []
    with torch.enable_grad(), on_stand_ins(call.module, here):
        for _ in range(1 + RUNS):
            inputs = tree_map(here, call.inputs)
            _finish(device)
            start = time.perf_counter_ns()
            output = call.forward(*inputs[0], **inputs[1])
            wanted = [x for x in tensors_in(output) if x.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
            _finish(device)
            times.append(time.perf_counter_ns() - start)
    return min(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
