"""Processes that have imported everything when they start.

A run has a launcher and workers, and each would import torch and Lightning first: of a case of the matrix, this is
most of the time. Here they are forked from a process that has done so, and in which nothing else has happened::

    runner ── fork ──► zygote, which waits, and forks ──► launcher, adopted by the runner
                                                          │
                                                          └─ fork ──► its zygote ── fork ──► workers, adopted by it

Whoever starts a process becomes its parent, as with :class:`subprocess.Popen`: the zygote forks twice, the process in
between ends, and the kernel gives the orphan to its nearest ancestor that adopts (Linux, PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any, NoReturn

import torch
from setproctitle import setproctitle
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER, <linux/prctl.h>
_SIZE = 8  # bytes of a number between processes
_IMPORTED = "recipes.launchers.local", "recipes.work", "recipes.data.digits", "sklearn.datasets", "tools.torture.model"


class Zygote:
    """Starts processes that have imported what a run imports. To be made before anything else happens in this process.

    A process runs the module that follows ``-m`` in its command.
    """

    def __init__(self) -> None:
        for module in _IMPORTED:
            importlib.import_module(module)
        torch.set_num_threads(1)
        ctypes.CDLL(None).prctl(_ADOPT, 1)
        self._requests, theirs = socket.socketpair()
        self._one_at_a_time = threading.Lock()
        starter = os.getpid()
        if os.fork() == 0:
            self._requests.close()
            _serve(theirs, starter)
        theirs.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, output: int) -> int:
        """Start a process in a session of its own, as a child of this one.

        Args:
            command: with ``-m`` and a module.
            environment: of the process.
            folder: that it works in.
            output: the file that it prints to.

        Returns:
            Its number.
        """
        request = json.dumps([list(command), dict(environment), folder]).encode()
        with self._one_at_a_time:
            socket.send_fds(self._requests, [len(request).to_bytes(_SIZE)], [output])
            self._requests.sendall(request)
            return int.from_bytes(_received(self._requests, _SIZE))


class Process:
    """What is used of :class:`subprocess.Popen` here and by torch's elastic agent, for a process of a zygote."""

    def __init__(
        self, zygote: Zygote, args: Sequence[str], *, env: Mapping[str, str],
        cwd: str | os.PathLike[str] = ".", stdout: IO[Any] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self.args = args
        self.returncode: int | None = None
        output = stdout.fileno() if stdout is not None else sys.stdout.fileno()
        self.pid = zygote.start(args, env, os.path.abspath(cwd), output)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it hasn't, after so many seconds.
        """
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(requests: socket.socket, starter: int) -> None:
    """Fork for each request, until the starter has ended. A new process leaves by an exception."""
    setproctitle("zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is meant for the starter
    while True:
        size, files, *_ = socket.recv_fds(requests, _SIZE, 1)
        if not size:
            os._exit(0)
        command, environment, folder = json.loads(_received(requests, int.from_bytes(size)))
        between = os.fork()
        if between == 0:
            if os.fork() > 0:
                os._exit(0)
            _wait_for_adoption(starter)
            requests.sendall(os.getpid().to_bytes(_SIZE))
            requests.detach()
            _become(command, environment, folder, files[0])
        os.waitpid(between, 0)
        os.close(files[0])


def _wait_for_adoption(starter: int) -> None:
    deadline = time.monotonic() + 5
    while os.getppid() != starter:
        if time.monotonic() > deadline:  # the starter has ended
            os._exit(0)
        time.sleep(0.001)


def _become(command: Sequence[str], environment: Mapping[str, str], folder: str, output: int) -> NoReturn:
    """What a new interpreter finds, and then the module."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in command)  # type: ignore[union-attr]
    setproctitle(shlex.join(command))
    place = command.index("-m")
    module = command[place + 1]
    if module == "recipes.train":  # its workers are forked too
        subprocess_handler.Popen = partial(Process, Zygote())  # type: ignore[assignment,attr-defined]
    sys.argv = list(command[place + 1 :])
    sys.modules.pop(module, None)  # it becomes __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes."""
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the zygote has ended")
        parts += part
    return parts
