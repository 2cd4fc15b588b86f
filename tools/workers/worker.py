"""What runs in a worker process of the pool, and what a function there may call."""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry
from lightning_utilities.core.inheritance import get_all_subclasses
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import BatchSampler, DataLoader

from lightning_parallel.ranks import rendezvous

ROOT = Path(__file__).resolve().parents[2]
HUNG_UP = (
    EOFError,
    BrokenPipeError,
    ConnectionResetError,
)  # what a connection raises whose other end is gone


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run, and where."""

    payload: bytes  # pickled (function, args, kwargs)
    environment: dict[str, str]
    directory: str
    init: bool
    timeout: float


def listen() -> TCPStore:
    """A rendezvous on a port that the kernel chose, open as long as the result lives."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def texts_of_warnings() -> Iterator[list[str]]:
    """Filled in the end, with all warnings, whatever filters there are."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def work(connection: Connection, log: str) -> None:
    """The life of a worker: calls, one after the other, until the parent hangs up."""
    os.setsid()  # so that the parent can end it together with the processes that it starts
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    gc.collect()
    # Each Trainer searches all installed packages for callbacks, which is half of the time that making one takes.
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined, assignment]
    imported = _freeze_imports(0)
    environment, directory = dict(os.environ), os.getcwd()
    connection.send_bytes(b"ready")
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except HUNG_UP:
            return
        connection.send_bytes(_answer(call))
        if connection.recv_bytes() != b"clean":
            return
        _leave()
        imported = _freeze_imports(imported)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        connection.send_bytes(b"clean")


def _answer(call: Call) -> bytes:
    """The pickled ("result", pickled result) or ("error", text)."""
    os.environ.update(call.environment)
    os.chdir(call.directory)
    _reset()
    value: bytes | str
    try:
        function, args, kwargs = pickle.loads(call.payload)
        if call.init:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{call.directory}.rendezvous",
                rank=int(call.environment["RANK"]),
                world_size=int(call.environment["WORLD_SIZE"]),
                timeout=timedelta(seconds=call.timeout),
            )
            dist.barrier()  # a rank that fails at once would leave while another one is still connecting
        kind, value = "result", pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # whatever a test raises, SystemExit too, is for the parent
        kind, value = "error", "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)  # their locals may keep process groups alive
    if kind == "error":
        _leave()  # at once: closed connections tell the ranks that wait for this one
    sys.stdout.flush()
    sys.stderr.flush()
    return pickle.dumps((kind, value))


def _reset() -> None:
    """Process-wide settings that a test before may have changed."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    # The parent asks a hung worker for the stacks with SIGUSR2. A Trainer that ends puts Python's back,
    # so there is one of those too; faulthandler's on top also answers from inside a C++ call.
    faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: faulthandler.dump_traceback(sys.stderr))
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    for kind in get_all_subclasses(DataLoader) | get_all_subclasses(BatchSampler) | {DataLoader, BatchSampler}:
        _put_back(kind)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _put_back(kind: type) -> None:
    """Lightning changes these methods while a hook makes a loader, and leaves them so if the hook raises. Loaders that
    are made then get the batch size of a prediction (1) in a fit after it."""
    for name in ("__init__", "__setattr__", "__delattr__"):
        if (before := vars(kind).get(f"__old{name}")) is not None:
            setattr(kind, name, before)
            delattr(kind, f"__old{name}")


def _freeze_imports(known: int) -> int:
    """What is imported stays, so the collections after each call need not look at it: they would take a fifth of the
    suite's time. Returns the number of modules, of which ``known`` were there before."""
    if len(sys.modules) > known:
        gc.freeze()
    return len(sys.modules)


def _leave() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.end()
    gc.collect()


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)
