"""A SLURM of two nodes on this one host, or on two machines, for as long as a `with` block lasts.

    with two_machines() as machines, slurm(tmp_path, machines) as cluster:
        cluster.run("sbatch", "--wait", "--partition=low", "job.sh")

munge's key and socket, the configuration, state, spool and logs are in the folder, and the ports are those that the
kernel gave, so clusters run side by side. Jobs in partition `high` preempt those in `low`. The nodes' names, n0 and n1,
don't resolve: jobs that form a process group need the machines' address and interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "mungekey")
# Where Debian has the daemons: the PATH of users often leaves it out.
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
INTERFACE = "eth0"  # of the machines' network
START_TIMEOUT = 60.0  # seconds until both nodes are idle
INTERVAL = 0.1  # seconds between two looks

# cred_expire: a requeued job waits for so long before it starts again, by default 120 s. A launch may take no longer.
# sched_interval: how often the scheduler looks for jobs whose wait is over, by default every 60 s.
# GraceTime: a preempted job's steps get SIGTERM at once, and SIGKILL after this time.
# config_overrides: the host may have fewer cores.
CONFIGURATION = """\
ClusterName=lp
SlurmctldHost=localhost({addresses[0]})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname=localhost NodeAddr={addresses[0]} Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=n1 NodeHostname=localhost NodeAddr={addresses[1]} Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def missing() -> list[str]:
    """The programs that a cluster needs and this machine lacks: a reason to skip."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


@dataclass(frozen=True)
class Machine:
    """Attributes: enter: what stands before a command to run it there; address; interface: of its network."""

    enter: list[str]
    address: str
    interface: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two namespaces. On a machine where they can't be made both are this machine, which there is no way to enter."""
    names = [f"lp{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        made = True
        for name in names:
            made = made and _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        made = made and _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        made = made and all(_ip("link", "set", name, "netns", name) for name in names)
        if not made:
            yield [Machine([], "127.0.0.1", "lo")] * 2
            return
        for number, name in enumerate(names, 1):
            assert _ip("-n", name, "link", "set", name, "name", INTERFACE)
            assert _ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", INTERFACE)
            assert all(_ip("-n", name, "link", "set", each, "up") for each in ("lo", INTERFACE))
        # Not `ip netns exec`: it mounts another /sys, without the control groups that SLURM looks for.
        enter = [["nsenter", f"--net=/run/netns/{name}"] for name in names]
        yield [Machine(words, f"10.99.0.{number}", INTERFACE) for number, words in enumerate(enter, 1)]


def _ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Attributes:
        environment: what SLURM's commands need to find it, in addition to os.environ.
        machine: where they are run.
    """

    environment: dict[str, str]
    machine: Machine

    def run(self, *command: str, seconds: float = 120.0) -> str:
        """Run a command with the cluster's environment and return what it prints.

        Raises:
            RuntimeError: it failed; with all that it printed.
            subprocess.TimeoutExpired: it took longer.
        """
        environment = {**os.environ, **self.environment}
        entered = [*self.machine.enter, *command]
        ended = subprocess.run(entered, env=environment, capture_output=True, text=True, timeout=seconds)
        if ended.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended.stdout


@contextlib.contextmanager
def slurm(folder: Path, machines: Sequence[Machine]) -> Iterator[Slurm]:
    """Run a cluster in an empty folder. At the end its processes are killed, and its jobs'; also if this one is killed.

    Args:
        folder: empty, on a path without spaces of 80 bytes at most: a socket's path has 107.
        machines: for the nodes. The first has the controller, and commands are run there.

    Raises:
        RuntimeError: the cluster didn't start; with the end of its logs.
    """
    folder = folder.resolve()
    for part in ("state", "spool-n0", "spool-n1"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    cluster = Slurm(environment, machines[0])
    with contextlib.ExitStack() as stack:
        # The kernel gives these ports to nobody else until the end. A daemon can listen on them all the same: both
        # sockets say SO_REUSEADDR, and these don't listen.
        holders = [stack.enter_context(socket.socket()) for _ in range(3)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))
        ports = [holder.getsockname()[1] for holder in holders]
        user = pwd.getpwuid(os.geteuid()).pw_name
        addresses = [machine.address for machine in machines]
        configuration = CONFIGURATION.format(folder=folder, ports=ports, user=user, addresses=addresses)
        (folder / "slurm.conf").write_text(configuration)
        cluster.run("mungekey", "--create", "--keyfile", f"{folder}/munge.key")
        command = [sys.executable, "-m", "tests.clusters.slurm", str(folder)]
        command += [shlex.join(machine.enter) for machine in machines]
        root, variables = Path(__file__).parents[2], {**os.environ, **environment}
        daemons = stack.enter_context(subprocess.Popen(command, cwd=root, env=variables, stdin=subprocess.PIPE))
        # Before Popen's exit, which waits. A closed pipe would do, unless a fork of this process has it, too.
        stack.callback(daemons.terminate)
        end = time.monotonic() + START_TIMEOUT
        while not _is_ready(cluster):
            if time.monotonic() > end or daemons.poll() is not None:
                logs = "\n".join(f"{log.name}: ...{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
                raise RuntimeError(f"SLURM did not start within {START_TIMEOUT} s\n{logs}")
            time.sleep(INTERVAL)
        yield cluster


def _is_ready(cluster: Slurm) -> bool:
    with contextlib.suppress(RuntimeError):  # while slurmctld doesn't answer
        return cluster.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split() == ["idle"] * 2
    return False


def _run_daemons(folder: Path, enter: Sequence[list[str]]) -> None:
    """In a process of its own: start the daemons, wait for SIGTERM or the parent's end, kill all that is left.

    What daemons and jobs leave becomes a child of this process. Their environment wouldn't show all of it:
    slurmstepd overwrites its own."""
    os.setsid()  # Ctrl-C is the parent's
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    def start(name: str, *command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    try:
        # --force: in folders that only their owner can open, as pytest's are.
        files = (f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed"))
        start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        while not (folder / "munge.socket").exists():
            time.sleep(INTERVAL)
        start("slurmctld", *enter[0], "slurmctld", "-D")
        for number, words in enumerate(enter):
            start(f"slurmd-n{number}", *words, "slurmd", "-D", "-N", f"n{number}")
        sys.stdin.read()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while processes := psutil.Process().children(recursive=True):
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=INTERVAL)  # until then, they are still its children


if __name__ == "__main__":
    _run_daemons(Path(sys.argv[1]), [shlex.split(words) for words in sys.argv[2:]])
