"""The layouts, with nothing set but what a user has to set, and what each is compared with."""

from __future__ import annotations

from functools import partial

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import lightning_parallel as lp
from tools.zoo import layouts
from tools.zoo.layouts import ONE_STAGE, PLAIN, REPLICAS, Layout

TIMEOUT = 240.0  # seconds that a rank waits for another: machines are shared, and a first step may import a lot
PATIENCE = 400.0  # seconds for all of a run
MICROBATCHES = 2
ASYNCHRONOUS = "asynchronous"

_PIPELINE = {"microbatches": MICROBATCHES, "timeout": TIMEOUT}
LAYOUTS = (
    Layout("1F1B", lp.PipelineStrategy, {"stages": 2, **_PIPELINE}, ranks=2, fallback=ONE_STAGE),
    Layout("ZB-V", lp.PipelineStrategy, {"stages": 2, "schedule": "zbv", **_PIPELINE}, ranks=2, fallback=ONE_STAGE),
    Layout(ASYNCHRONOUS, lp.AsyncPipelineStrategy, {"stages": 2, **_PIPELINE}, ranks=2, fallback=ONE_STAGE),
    Layout("tensor", lp.TensorParallelStrategy, {"tensor_parallel": 2, "timeout": TIMEOUT}, ranks=2),
    Layout("fully sharded", lp.FullyShardedStrategy, {"timeout": TIMEOUT}, ranks=2, shares=True, fallback=REPLICAS),
)
REFERENCES = (
    Layout(PLAIN, SingleDeviceStrategy),
    Layout(ONE_STAGE, lp.PipelineStrategy, {"stages": 1, **_PIPELINE}),
    Layout(REPLICAS, DDPStrategy, {"find_unused_parameters": True}, ranks=2, shares=True),
)
find = partial(layouts.find, among=(*LAYOUTS, *REFERENCES))
