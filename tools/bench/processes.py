"""Worker processes of a measurement: started from a server that has imported everything, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

# Imported once, by the server that workers are forked from. torch._dynamo: the first optimizer imports it.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "lightning_parallel",
]
_LEAVING = 10.0  # seconds in which a process that has been killed must have ended
_SAID = 300  # the most characters of an error in a cell of a table


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks of a group, one thread each: the results, by rank.

    Args:
        fn: at the top level of a module. A Trainer in it joins the group that exists.
        backend: the backend of the group. Over NCCL the current device is a GPU of the rank's own, or, where there are
            too few, the first one for all ranks.
        limit: seconds from the start of the processes; None for no limit.
        environment: variables of the ranks, which are set before they use a GPU.
        preload: modules that the first measurement of a program imports for all ranks to come.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others have been ended.
        TimeoutError: the ranks hadn't ended within the limit, and have been ended. If one had raised, and couldn't
            leave, its error is the cause.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or its imports start CUDA, which can't be forked
    multiprocessing.set_forkserver_preload([*_PRELOAD, *preload])
    # Port 0: the kernel chooses one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        call = _Call(world_size, store.port, Path(scratch), backend, dict(environment or {}), fn, args)
        context = torch_multiprocessing.start_processes(  # type: ignore[attr-defined]
            _work, (call,), world_size, join=False, start_method="forkserver"
        )
        assert context is not None, "join=False gives a context"
        end = None if limit is None else time.monotonic() + limit
        try:
            while not context.join(None if end is None else max(0.0, end - time.monotonic())):
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError(f"stopped after {limit:g} s") from _raised(context)
        finally:
            for process in context.processes:  # after Ctrl-C: one that waits for a message would stay
                if process.is_alive():
                    process.kill()
                process.join(_LEAVING)
        return [pickle.loads((Path(scratch) / str(rank)).read_bytes()) for rank in range(world_size)]


def attempt(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> tuple[str, list[Any] | None]:
    """As :func:`run`, for what may hang or fail. Returns how it ended ("ended", "failed: ..." or "hung: ..."), for a
    cell, and the results; None in their place if it failed or hung."""
    try:
        return "ended", run(fn, world_size, *args, **options)
    except TimeoutError as error:
        return f"failed: {_last(error.__cause__)}" if error.__cause__ else f"hung: {error}", None
    except (ProcessRaisedException, ProcessExitedException) as error:
        return f"failed: {_last(error)}", None


def _raised(context: Any) -> RuntimeError | None:
    """The error of a rank that has raised one; None for none."""
    files = [Path(file) for file in context.error_files if file is not None and Path(file).exists()]
    return RuntimeError(pickle.loads(files[0].read_bytes())) if files else None


def _last(error: BaseException) -> str:
    """What a traceback says after its last frame, on one line."""
    lines = takewhile(lambda line: not line.startswith(" "), reversed(str(error).strip().splitlines()))
    return " ".join(reversed([*lines]))[:_SAID]


@dataclass(frozen=True)
class _Call:
    """What the ranks do."""

    world_size: int
    port: int
    scratch: Path
    backend: str
    environment: Mapping[str, str]
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def _work(rank: int, call: _Call) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker wherever it waits, without a traceback
    threading.Thread(target=_follow_parent, daemon=True).start()
    # As torch's elastic agent would set it: a Trainer then knows that the processes are there.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(call.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        GLOO_SOCKET_IFNAME="lo",  # else gloo asks the name server for this host
        TORCHELASTIC_RUN_ID="bench",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(call.environment)
    torch.set_num_threads(1)
    if over_nccl := call.backend == "nccl":
        torch.cuda.set_device(rank if torch.cuda.device_count() >= call.world_size else 0)
    dist.init_process_group(call.backend)
    result = call.fn(*call.args)
    (call.scratch / str(rank)).write_bytes(pickle.dumps(result))
    # None closes its connections while another needs them.
    dist.barrier(device_ids=[torch.cuda.current_device()] if over_nccl else None)
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End with the process that started this one, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
