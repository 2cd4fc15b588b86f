"""The process group of a run: which backend it has, joining it, agreeing on a seed, and leaving it."""

from __future__ import annotations

import atexit
import gc
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_parallel.private.lightning.launching import init_process_group
from lightning_parallel.private.torch.groups import abort_groups, connecting, forget_meshes
from lightning_parallel.ranks import rendezvous
from lightning_parallel.ranks.collectives import all_alike, broadcast_object
from lightning_parallel.ranks.layout import Layout

_BACKENDS = ("gloo", "nccl")
_PATIENCE = 60.0  # seconds, for a GPU to send what is queued


def backend_for(devices: Sequence[torch.device], device: torch.device) -> str:
    """The backend for ranks on these devices: NCCL where every rank has a GPU of its own."""
    if len(set(devices)) < len(devices):
        return "gloo"  # NCCL can't join two ranks on one GPU
    return dist.get_default_backend_for_device(device)


def join(environment: ClusterEnvironment, layout: Layout, backend: str, timeout: timedelta) -> bool:
    """Join the default process group, unless this process is in one already. Returns whether it has joined.

    Raises:
        ValueError: the backend is none that messages are known to travel over.
        RuntimeError: this process is in a group of another size than the layout's, of several backends, or bound
            to a device; or gloo could not connect the ranks.
    """
    forget_meshes()  # of process groups that are gone
    joined = not dist.is_initialized()
    if joined:
        if backend not in _BACKENDS:
            raise ValueError(f"process_group_backend={backend!r} isn't known here: set it to 'gloo', or to 'nccl'.")
        # A failed Trainer is part of reference cycles, and keeps its groups' connections open. A rank that has not
        # failed with it notices the error when they are closed.
        gc.collect()
        store = rendezvous.store_of_next_group(environment, timeout)
        # Not bound to a device: NCCL would split this group for each later one, and wait for all of its ranks.
        with connecting():
            init_process_group(environment, backend, timeout, store=store)
        atexit.unregister(leave)
        atexit.register(leave)
    if dist.get_world_size() != layout.world_size:
        raise RuntimeError(
            f"A process group of {dist.get_world_size()} processes exists already, but this Trainer asks for "
            f"{layout.world_size} (devices x num_nodes). End it first with torch.distributed.destroy_process_group(), "
            f"or start this run in a fresh process."
        )
    fix = "End it first with torch.distributed.destroy_process_group(), or make it with"
    if dist.get_backend() not in _BACKENDS:  # one of several would have one queue for messages of all kinds
        raise RuntimeError(
            f"A process group with backend={dist.get_backend()!r} exists already. {fix} backend='gloo' or 'nccl'."
        )
    world = dist.group.WORLD
    if world is not None and world.bound_device_id is not None:  # NCCL would split it, see above
        raise RuntimeError(f"A process group that was made with device_id= exists already. {fix}out device_id=.")
    return joined


def agree_on_seed(layout: Layout) -> int:
    """The run's seed, equal on all ranks. Ranks of one replica then draw the same samples and augmentations.

    Where the user's script has left the same random state on all ranks, as ``seed_everything`` does, it stays as it is,
    and the data come in the order of a single process. Otherwise rank 0 chooses a seed for all.
    """
    own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
    states = (torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate())  # type: ignore[index,union-attr]
    agreed = broadcast_object(own, None, None)
    if layout.size("data") > 1 or not all_alike(None, (own, states)):
        seed = agreed + layout.index("data")
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
    return agreed


def close() -> None:
    """After an error, close this rank's connections. When this process ends, the other ranks end within seconds. But a
    rank whose GPU waits in a collective over NCCL ends at the timeout. One that expects a message of this rank ends
    sooner (``announced.py``)."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        abort_groups()
    else:
        dist.destroy_process_group()


def leave() -> None:
    """Destroy the process group before the interpreter is finalized, once this rank's GPU has sent all.

    A thread of gloo's needs Python's lock to release a collective's tensors. If it asks for the lock while the
    interpreter is being finalized, the process ends with SIGABRT, "terminate called without an active exception"
    (https://github.com/pytorch/pytorch/issues/190489). Destroying the group joins these threads, except those of groups
    that something still refers to, as a script's Trainer and DTensor's caches do. These threads get the lock while this
    one sleeps.
    """
    if dist.is_initialized():
        forget_meshes()
        gc.collect()  # a finished Trainer is part of reference cycles, and keeps groups alive
        if dist.get_backend() == "nccl" and not _has_sent_all():
            abort_groups()
        else:
            dist.destroy_process_group()
        time.sleep(0.01)
    rendezvous.end()


def _has_sent_all() -> bool:
    """Wait for this rank's GPU: an evaluation's last message may only be queued, since no gradient answers it. False
    for a GPU that has failed, whose error has been reported before, and for one that doesn't come to an end: its
    message will never be received."""
    done: list[bool] = []

    def wait() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize(device)
            done.append(True)

    device = torch.cuda.current_device()
    waiting = Thread(target=wait, daemon=True)  # torch can't wait for some time only
    waiting.start()
    waiting.join(_PATIENCE)
    return bool(done)
