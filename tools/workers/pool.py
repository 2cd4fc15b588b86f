"""One pool of worker processes for a whole test session, or a whole program.

Importing torch and Lightning takes seconds, so the processes are started once (forked from a server that has
imported everything) and functions are sent to them::

    def sum_of_ranks() -> float:                      # module level: workers import it by name
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_every_rank_gets_the_sum(pool: WorkerPool) -> None:
        assert pool.run(sum_of_ranks, 4) == [6.0, 6.0, 6.0, 6.0]

Groups are made through a file. For a Trainer that joins by itself (`init=False`) the parent listens on the
rendezvous port, as torch's elastic agent does: no port is picked that somebody else could take in between.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tools.workers.worker import HUNG_UP, Call, listen, work

MAX_WORKERS = 8
START_TIMEOUT = 180.0  # seconds until every new worker has answered
CLEAN_TIMEOUT = 30.0  # seconds for a worker that has answered to leave its process groups
GRACE = 20.0  # seconds that the other ranks get to answer after one has failed
OUTPUT_LINES = 30  # of what a failed rank printed


class WorkerError(RuntimeError):
    """A call failed on at least one rank.

    Attributes:
        rank: the lowest rank that failed.
        errors: for each failed rank its traceback as text, in the order in which the ranks failed.
    """

    def __init__(self, function: str, errors: dict[int, str]) -> None:
        self.rank = min(errors)
        self.errors = errors
        lines = [f"{function} failed on rank{'s' if len(errors) > 1 else ''} {', '.join(map(str, errors))}"]
        shown: dict[str, int] = {}
        for rank, text in errors.items():
            if text in shown:
                lines.append(f"--- rank {rank}: as rank {shown[text]}")
            else:
                shown[text] = rank
                lines.append(f"--- rank {rank}:\n{text.rstrip()}")
        super().__init__("\n".join(lines))


class Failure(str):
    """What a failed rank returns to `run(..., expect_errors=True)`: its traceback, the exception last."""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    log: Path

    def tail(self, lines: int) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def where(self) -> str:
        """The stacks of all threads of a worker that does not answer."""
        assert self.process.pid is not None, "a worker is started before it is kept"
        before = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 2.0
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            size, last = self.log.stat().st_size, size
            if size == last > before:
                break
        with self.log.open("rb") as log:
            log.seek(before)
            return log.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the worker and whatever it started: it leads a session of its own."""
        assert self.process.pid is not None, "a worker is started before it is kept"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass(slots=True)
class WorkerPool:
    """Runs functions on ranks that are processes. Use the fixture `pool`: there is one for the session.

    Args:
        preload: modules that the server imports that workers are forked from. A process has one such server: the first
            pool's modules count.
        forks: fork workers from this process, with what it has imported, in the place of a server. For modules that
            take long to import, in a process without threads.
    """

    preload: list[str] = field(default_factory=lambda: ["tools.workers.preloaded"])
    forks: bool = False
    _workers: list[_Worker] = field(default_factory=list)
    _directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="lightning-parallel-tests-")))
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        init: bool = True,
        expect_errors: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on ranks 0 to `world_size` - 1; the results, by rank.

        Args:
            fn: a function at the top level of a test module; arguments and results are pickled, by value.
            world_size: at most `MAX_WORKERS`.
            timeout: seconds until a rank that has not answered counts as hung.
            init: join a gloo process group of that size before. Without it only the environment of a torchrun
                worker is there, for a Trainer that joins by itself. Either way the group is left after.
            expect_errors: a rank that raises or dies gives a `Failure` instead of ending the call.

        Each call starts in an empty working directory of its own, with fixed seeds.

        Raises:
            WorkerError: a rank raised, died or hung. Died or hung workers are replaced before the next call.
        """
        name = getattr(fn, "__qualname__", repr(fn))
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORKERS} workers")
        if "<locals>" in name or "<lambda>" in name:
            raise ValueError(f"{name} is not at the top level of its module, so workers cannot import it")
        payload = pickle.dumps((fn, args, kwargs))
        try:
            self._grow(world_size)
            answers = self._call(payload, world_size, timeout, init, name)
        except BaseException:  # also Ctrl-C: workers in the middle of a call are of no further use
            self.close()
            raise
        errors = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if errors and not expect_errors:
            raise WorkerError(name, {rank: str(text) for rank, text in errors.items()})
        results = [answers[rank] for rank in range(world_size)]
        return [result if isinstance(result, Failure) else pickle.loads(result) for result in results]

    def close(self) -> None:
        """End all workers; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def shutdown(self) -> None:
        """`close`, and delete the pool's files."""
        self.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _grow(self, count: int) -> None:
        new: list[_Worker] = []
        context: Any = multiprocessing.get_context("fork" if self.forks else "forkserver")
        if not self.forks:
            context.set_forkserver_preload(self.preload)
        while len(self._workers) < count:
            log = self._directory / f"worker{next(self._serial)}.log"
            log.touch()
            ours, theirs = context.Pipe()
            # Not a daemon in multiprocessing's sense: those may not start processes, and data loaders do.
            process = context.Process(target=work, args=(theirs, str(log)), daemon=False)
            process.start()
            theirs.close()
            new.append(_Worker(process, ours, log))
            self._workers.append(new[-1])
        deadline = time.monotonic() + START_TIMEOUT
        for worker in new:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"a worker did not start within {START_TIMEOUT:g} s:\n{worker.tail(OUTPUT_LINES)}")
            try:
                worker.connection.recv_bytes()
            except EOFError:
                raise RuntimeError(f"a worker ended while starting:\n{worker.tail(OUTPUT_LINES)}") from None

    def _call(self, payload: bytes, world_size: int, timeout: float, init: bool, name: str) -> dict[int, Any]:
        workers = self._workers[:world_size]
        directory = self._directory / f"call{next(self._serial)}"
        directory.mkdir()
        store = listen()  # the kernel chooses the port; alive until every rank has left
        for rank, worker in enumerate(workers):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "GLOO_SOCKET_IFNAME": "lo",  # else gloo asks the name server for this host
                "TORCHELASTIC_RUN_ID": "pool",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            os.truncate(worker.log, 0)
            call = Call(payload, environment, str(directory), init, timeout)
            with contextlib.suppress(*HUNG_UP):  # _collect tells of it
                worker.connection.send_bytes(pickle.dumps(call))
        answers, broken = self._collect(workers, timeout)
        broken |= self._clean(workers, answers, broken)
        del store
        shutil.rmtree(directory, ignore_errors=True)
        if broken:
            hung = [rank for rank in broken if rank not in answers]
            where = {rank: workers[rank].where() for rank in hung}
            for rank in hung:
                answers[rank] = Failure(f"rank {rank} had not answered; it was at\n{where[rank]}")
            self.close()
            if hung:
                failed = {rank: str(text) for rank, text in answers.items() if isinstance(text, Failure)}
                raise WorkerError(f"{name} (timeout {timeout:g} s)", failed)
        return answers

    def _collect(self, workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """Answers by rank in the order of arrival, and the ranks whose process is dead or hung."""
        waiting = dict(enumerate(workers))
        answers: dict[int, Any] = {}
        broken: set[int] = set()
        deadline = time.monotonic() + timeout
        while waiting:
            # The sentinels too: a child of a dead worker may hold the other end of its connection open.
            ends = [end for worker in waiting.values() for end in (worker.connection, worker.process.sentinel)]
            ready = wait(ends, max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers, broken | set(waiting)
            for rank, worker in list(waiting.items()):
                if worker.connection not in ready and worker.process.sentinel not in ready:
                    continue
                del waiting[rank]
                try:
                    if not worker.connection.poll():
                        raise EOFError
                    kind, value = pickle.loads(worker.connection.recv_bytes())
                except HUNG_UP:
                    worker.process.join(5.0)
                    kind, value = "error", f"the worker died, exit code {worker.process.exitcode}"
                    broken.add(rank)
                if kind == "error":
                    output = worker.tail(OUTPUT_LINES)
                    value = Failure(f"{output}\n{value}" if output else value)
                    deadline = min(deadline, time.monotonic() + GRACE)
                answers[rank] = value
        return answers, broken

    def _clean(self, workers: list[_Worker], answers: dict[int, Any], broken: set[int]) -> set[int]:
        """Let the ranks leave their process groups, now that nobody waits; the ranks that could not."""
        waiting = {rank: workers[rank] for rank in answers if rank not in broken}
        deadline = time.monotonic() + CLEAN_TIMEOUT
        stuck = set()
        for worker in waiting.values():
            with contextlib.suppress(*HUNG_UP):
                worker.connection.send_bytes(b"clean")
        for rank, worker in waiting.items():
            try:
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    worker.connection.recv_bytes()
                    continue
            except HUNG_UP:
                pass
            stuck.add(rank)
        return stuck
