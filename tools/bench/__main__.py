"""``python -m tools.bench pipeline``: measures the pipelines beside torch's own and beside loops by hand;
``python -m tools.bench tensor``: the layers of tensor parallelism beside DTensor and beside bare functions;
``python -m tools.bench data``: replicas that share every batch, in a Trainer and in bare loops of torch's own;
``python -m tools.bench checkpoint``: saving and opening, beside torch's distributed checkpoint;
``python -m tools.bench optimizers``: steps where ranks divide parameters, beside bare ones;
``python -m tools.bench plan``: what a plan predicts of layouts, beside what they take."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from recipes.tables import Table, circumstances
from tools.bench import (
    checkpoints,
    compute,
    contention,
    data,
    folder,
    halves,
    host_time,
    in_flight,
    late,
    memory,
    messages,
    one_device,
    optimizers,
    overhead,
    plan,
    plan_models,
    report,
    shared_device,
    sleeping,
    tensor,
    two_ranks,
    whole,
)

Part = tuple[Callable[[], Iterable[Table]], Callable[[], Iterable[Table]]]  # in full, and with --quick
S = TypeVar("S")


def _part(measure: Callable[[S], Iterable[Table]], sizes: S, quick: S) -> Part:
    return partial(measure, sizes), partial(measure, quick)


# What each word of --only measures.
PIPELINE: dict[str, Part] = {
    "sleeping": _part(sleeping.measure, sleeping.Sizes(), sleeping.QUICK),
    "compute": _part(compute.measure, compute.Sizes(), compute.QUICK),
    "halves": _part(halves.measure, halves.Sizes(), halves.QUICK),
    "overhead": _part(overhead.measure, overhead.Sizes(), overhead.QUICK),
    "memory": _part(memory.measure, memory.Sizes(), memory.QUICK),
    "whole": _part(whole.measure, whole.Sizes(), whole.QUICK),
    "one": _part(one_device.measure, one_device.Sizes(), one_device.QUICK),
    "shared": _part(shared_device.measure, shared_device.Sizes(), shared_device.QUICK),
}
# With --device cuda.
PIPELINE_CUDA: dict[str, Part] = {
    "one": _part(one_device.measure, one_device.CUDA, one_device.QUICK_CUDA),
    "shared": _part(shared_device.measure, shared_device.CUDA, shared_device.QUICK_CUDA),
    "late": _part(late.measure, late.CUDA, late.QUICK_CUDA),
    "nccl": _part(two_ranks.measure, two_ranks.CUDA, two_ranks.QUICK_CUDA),
    "host": _part(host_time.measure, host_time.CUDA, host_time.QUICK_CUDA),
    "flight": _part(in_flight.measure, in_flight.CUDA, in_flight.QUICK_CUDA),
    "contention": _part(contention.measure, contention.CUDA, contention.QUICK_CUDA),
}
TENSOR: dict[str, Part] = {
    "mlp": _part(tensor.measure_mlp, tensor.MLPSizes(), tensor.QUICK_MLP),
    "block": _part(tensor.measure_block, tensor.BlockSizes(), tensor.QUICK_BLOCK),
    "messages": _part(messages.measure, messages.Sizes(), messages.QUICK),
    "alone": _part(tensor.measure_alone, tensor.AloneSizes(), tensor.QUICK_ALONE),
}
# With --device cuda.
TENSOR_CUDA: dict[str, Part] = TENSOR | {
    "alone": _part(tensor.measure_alone, tensor.CUDA_ALONE, tensor.QUICK_CUDA_ALONE),
}
DATA: dict[str, Part] = {
    "ddp": (partial(data.measure, data.DDP_GROUP, data.Sizes()), partial(data.measure, data.DDP_GROUP, data.QUICK)),
    "fsdp": (partial(data.measure, data.FSDP_GROUP, data.Sizes()), partial(data.measure, data.FSDP_GROUP, data.QUICK)),
    "pipeline": (
        partial(data.measure, data.PIPELINE_GROUP, data.PIPELINE),
        partial(data.measure, data.PIPELINE_GROUP, data.QUICK_PIPELINE),
    ),
    "dp": (
        partial(data.measure, data.THREADS_GROUP, data.SHORT, data.Sizes()),
        partial(data.measure, data.THREADS_GROUP, data.QUICK_SHORT, data.QUICK),
    ),
}

CHECKPOINT: dict[str, Part] = {
    "whole": _part(checkpoints.measure, checkpoints.Sizes(), checkpoints.QUICK),
    "folder": _part(folder.measure, folder.Sizes(), folder.QUICK),
}

OPTIMIZERS: dict[str, Part] = {
    "step": (partial(optimizers.measure, optimizers.Sizes()), partial(optimizers.measure, optimizers.QUICK)),
}


def _on(device: str) -> dict[str, dict[str, Part]]:
    """What can be measured there."""
    if device == "cuda":
        return {"pipeline": PIPELINE_CUDA, "tensor": TENSOR_CUDA}
    return {
        "pipeline": PIPELINE,
        "tensor": TENSOR,
        "data": DATA,
        "checkpoint": CHECKPOINT,
        "optimizers": OPTIMIZERS,
        "plan": plan.Bench().parts(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    parts = _on(options.device).get(options.what)
    if parts is None:
        raise SystemExit(f"--device={options.device}: {options.what} is measured on CPUs; leave it out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no GPU that torch can use here")
    only = options.only or list(parts)
    unknown = [name for name in only if name not in parts]
    if unknown:
        raise SystemExit(f"--only={','.join(only)}: no {unknown[0]!r}; choose among {', '.join(parts)}")
    facts = circumstances()
    print(report.headline(facts), flush=True)
    begin = time.monotonic()
    tables: dict[str, Table] = {}  # by title: a table may come again with a row more
    for name in only:
        full, quick = parts[name]
        for table in (quick if options.quick else full)():
            tables[table.title] = table
            print(f"\n{table.text()}", flush=True)
            if options.output is not None:  # at once: it may be ended
                report.write(options.output, options.what, facts, [*tables.values()])
    print(f"\n{time.monotonic() - begin:.0f} s")
    if options.output is not None:
        print(f"Written: {options.output / options.what}.md and .json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure the strategies beside what they are measured against, in the same run.",
        epilog="Figures of different runs can be compared only on an idle machine.",
    )
    parser.add_argument("what", choices=[*_on("cpu")])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="PART,...",
        help=f"some of: {', '.join(PIPELINE)} of the pipeline, {', '.join(TENSOR)} of tensor, "
        f"{', '.join(DATA)} of data, {', '.join(plan_models.FAMILIES)}, "
        f"{plan.FOUR} of plan (default: all)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where layers that nothing is divided in (alone), a single stage (one) and stages that share a device "
        f"(shared) are measured. Only with cuda: {', '.join(sorted({*PIPELINE_CUDA} - {*PIPELINE}))} of the pipeline. "
        "The rest is measured on CPUs",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, in less than a minute: to see that it runs")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the tables there, as .md and .json")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C: the workers are ended first
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
