"""gradients/summing.py: the sum over ranks, in one message; no gradient on any rank stays none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.gradients.summing import summed_over
from lightning_parallel.gradients.swapping import Gradients
from tests.pool import WorkerPool


def summed(apart: bool) -> tuple[Gradients, Gradients]:
    group = dist.group.WORLD
    assert group is not None
    host_group = dist.new_group(range(group.size())) if apart else None
    rank = group.rank()
    parameters = {
        "both": torch.zeros(2, 3, dtype=torch.float64),
        "one": torch.zeros(2, dtype=torch.bfloat16),
        "none": torch.zeros(1),
        "": torch.zeros(()),
    }
    gradients: Gradients = {
        "both": torch.full((2, 3), rank + 1.0, dtype=torch.float64),
        "one": torch.ones(2, dtype=torch.bfloat16) if rank == 1 else None,
        "none": None,
        "": torch.tensor(float(rank)),
        "unnamed": torch.ones(1),
    }
    sums = summed_over(group, list(parameters), parameters, gradients, host_group)
    return sums, summed_over(group, [], {}, gradients, host_group)


@pytest.mark.parametrize("apart", [False, True])
def test_sums_have_the_parameters_dtypes_and_shapes(pool: WorkerPool, apart: bool) -> None:
    for found, nothing in pool.run(summed, 3, apart):
        assert nothing == {} and list(found) == ["both", "one", "none", ""]
        both, one, scalar = found["both"], found["one"], found[""]
        assert both is not None and torch.equal(both, torch.full((2, 3), 6.0, dtype=torch.float64))
        assert one is not None and torch.equal(one, torch.ones(2, dtype=torch.bfloat16))
        assert scalar is not None and torch.equal(scalar, torch.tensor(3.0))
        assert found["none"] is None


LAUNCHED = SimpleNamespace(wait=bool)  # work that nobody waits for


def on_meta() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and gradients without values: whatever read one would fail."""
    made = {name: torch.zeros(3, device="meta") for name in "ab"}
    return made, {name: torch.ones(3, device="meta") for name in made}


def test_a_device_is_not_waited_for_if_no_gradient_is_missing() -> None:
    parameters, gradients = on_meta()
    group: Any = None
    with patch.object(dist, "all_reduce", return_value=LAUNCHED):
        assert all(total is not None for total in summed_over(group, [*parameters], parameters, gradients).values())
        with pytest.raises(NotImplementedError):  # another rank may have it
            summed_over(group, [*parameters], parameters, {**gradients, "b": None})


def test_a_device_is_not_waited_for_if_hosts_ask_each_other() -> None:
    parameters, gradients = on_meta()
    group: Any = object()
    hosts: Any = object()
    with patch.object(dist, "all_reduce", return_value=LAUNCHED):  # the other rank's flags are this one's
        sums = summed_over(group, [*parameters], parameters, {**gradients, "b": None}, hosts)
    assert [name for name, total in sums.items() if total is None] == ["b"]
