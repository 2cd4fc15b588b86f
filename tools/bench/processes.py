"""Worker processes of a measurement: started from a server that has imported everything, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

# Imported once, by the server that workers are forked from. torch._dynamo: the first optimizer imports it.
_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "lightning_parallel",
]


def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` ranks of a gloo group, one thread each: the results, by rank.

    Args:
        fn: at the top level of a module. A Trainer in it joins the group that exists.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others have been ended.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it imports torch
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or its imports start CUDA, which can't be forked
    multiprocessing.set_forkserver_preload(_PRELOAD)
    # Port 0: the kernel chooses one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        context = torch_multiprocessing.start_processes(  # type: ignore[attr-defined]
            _work, (world_size, store.port, scratch, fn, args), world_size, join=False, start_method="forkserver"
        )
        assert context is not None, "join=False gives a context"
        try:
            while not context.join():
                pass
        finally:
            for process in context.processes:  # after Ctrl-C: one that waits for a message would stay
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(scratch) / str(rank)).read_bytes()) for rank in range(world_size)]


def _work(rank: int, world_size: int, port: int, scratch: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker wherever it waits, without a traceback
    threading.Thread(target=_follow_parent, daemon=True).start()
    # As torch's elastic agent would set it: a Trainer then knows that the processes are there.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",  # else gloo asks the name server for this host
        TORCHELASTIC_RUN_ID="bench",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = fn(*args)
    (Path(scratch) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()  # none closes its connections while another needs them
    dist.destroy_process_group()


def _follow_parent() -> None:
    """End with the process that started this one, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
