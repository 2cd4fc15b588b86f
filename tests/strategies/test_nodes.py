"""Several machines: torchrun starts the ranks of each, and Lightning finds them.

Two network namespaces stand for two machines, each with an address of its own, where the test may make them; else two
torchrun agents share the loopback device.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.machines import two_machines
from tests.pool import WorkerPool
from tests.strategies.harness import train

pytestmark = pytest.mark.thorough  # tests/clusters/test_torchrun.py has two agents too

SCRIPT = """
import json, os, sys, torch
from tests.strategies.harness import ALL, make_trainer, Report, Witness
torch.set_default_dtype(torch.float64)
report = Report()
options = dict(stages=2, tensor_parallel=2, microbatches=2)
trainer = make_trainer("sync", [Witness(report)], options, devices=2, num_nodes=2, max_epochs=1)
model = ALL["ShardableLlama"]
trainer.fit(model(), model.loader())
layout = trainer.strategy.layout
place = dict(rank=layout.rank, node=trainer.node_rank, tensor=layout.peers("tensor"), losses=report.losses)
with open(os.path.join(sys.argv[1], f"{layout.rank}.json"), "w") as file:
    json.dump(place, file)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four ranks reports."""
    directory = tmp_path_factory.mktemp("nodes")
    (directory / "script.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with two_machines() as machines:
        agents = [
            subprocess.Popen(
                [*machine.enter, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                 "--nproc-per-node=2", f"--master-addr={machines[0].address}", f"--master-port={port}",
                 str(directory / "script.py"), str(directory)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": machine.interface,
                     "PYTHONPATH": str(Path(__file__).parents[2]),
                     "TMPDIR": str(directory)},  # torchrun leaves a folder there
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for node, machine in enumerate(machines)
        ]  # fmt: skip
        try:
            outputs = [agent.communicate(timeout=150)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(4)]


def test_two_machines_train_as_one_process(ranks: list[dict[str, Any]], pool: WorkerPool) -> None:
    single = pool.run(train, 1, "ShardableLlama", init=False, max_epochs=1)[0]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(single.losses, rel=0, abs=1e-12)


def test_a_tensor_group_stays_inside_a_machine(ranks: list[dict[str, Any]]) -> None:
    assert [rank["node"] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["tensor"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
