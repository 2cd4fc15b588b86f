"""Plans two large Llama models for 8 to 1,024 H100, beside speeds that were published.

::

    python -m tools.on_paper docs/on-paper.md

Nothing of it is measured: the models have no memory, and the device is that of a data sheet. The tables between the
marks of the page are written anew.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_parallel
from lightning_parallel.comparison.runs import trainer_of
from lightning_parallel.costs.devices import described
from lightning_parallel.costs.loading import Loaded
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.planned_module import PlannedModule, ready
from lightning_parallel.planning.planner import row_of
from lightning_parallel.planning.table import Plan, Row, one_of_each
from lightning_parallel.settings import binary_size
from tools.pages import replaced

CONTEXT = 8192
PRECISION = "bf16-mixed"
SIZES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
PLANNED = (("8B", 8), ("8B", 64), ("8B", 1024), ("70B", 64), ("70B", 1024))
SEQUENCES = 4  # of a batch, for each device
SHOWN = 6  # layouts of each plan


class Llama(L.LightningModule):
    """Llama 3.1 without memory."""

    def __init__(self, size: str) -> None:
        super().__init__()
        common = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": CONTEXT}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**SIZES[size], **common, use_cache=False))  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


@dataclass(frozen=True)
class Published:
    """A speed that others have measured.

    Attributes:
        rate: tokens a second of each device.
        by: what it was measured with.
    """

    size: str
    device: str
    devices: int
    sequences: int
    rate: float
    by: str


# Fully sharded replicas, bfloat16, without torch.compile and Float8.
_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; selective activation checkpointing"
_A100 = "torchtitan, docs/performance.md of 2024; activation checkpointing: {}"
PUBLISHED = (
    Published("8B", "h100", 8, 16, 5762, _H100),
    Published("8B", "h100", 128, 256, 5605, _H100),
    Published("8B", "a100", 64, 64, 2904, _A100.format("of every second layer")),
    Published("70B", "a100", 64, 64, 331, _A100.format("of all layers")),
)


def planned(size: str, device: str, devices: int, sequences: int, memory: str) -> Plan:
    """The layouts of a model for a batch of so many sequences."""
    return lightning_parallel.plan(
        Llama(size), _batch(sequences), devices=devices, memory=memory, device=device, precision=PRECISION
    )


def _batch(sequences: int) -> Tensor:
    return torch.zeros(sequences, CONTEXT, dtype=torch.long)


def of_plans(cases: Sequence[tuple[str, int]]) -> Iterator[str]:
    """The best layouts of each model on so many H100 of 80 GiB."""
    for size, devices in cases:
        start = time.process_time()
        plan = planned(size, "h100", devices, SEQUENCES * devices, "80GiB")
        text = [
            f"### {size} on {devices:,} H100",
            f"{SEQUENCES * devices:,} sequences of {CONTEXT:,} tokens a step. {len(plan.found):,} layouts, of which "
            f"{len(plan.rows):,} fit, planned in {time.process_time() - start:.0f} s of a core.",
            "| layout | microbatches | tokens/s of a device | memory | bubble |\n|---|--:|--:|--:|--:|",
        ]
        yield "\n\n".join(text) + "".join(f"\n{_line(row)}" for row in one_of_each(plan.rows)[:SHOWN])


def _line(row: Row) -> str:
    count = row.choice.microbatches if row.choice.is_pipeline else ""
    bubble = f"{row.time.bubble:.0%}" if row.choice.is_pipeline else ""
    return f"| {row.choice} | {count} | {_rate(row, SEQUENCES):,.0f} | {binary_size(row.memory.total)} | {bubble} |"


def _rate(row: Row, sequences: float) -> float:
    """Tokens a second of each device, which has so many sequences of a batch."""
    return sequences * CONTEXT / row.time.total


def beside_published(cases: Sequence[Published]) -> Iterator[str]:
    """Fully sharded replicas, as planned and as measured by others."""
    yield "| model | devices | planned | with all layers run again | published | by |\n|---|---|--:|--:|--:|---|"
    for case in cases:
        row = _fully_sharded(case)
        whole = _rate(row, case.sequences / case.devices)
        again = whole * row.time.total / (row.time.total + row.time.computing / 3)  # a third of it is the forward
        where = f"{case.devices} {case.device.upper()}"
        yield f"\n| {case.size} | {where} | {whole:,.0f} | {again:,.0f} | {case.rate:,.0f} | {case.by} |"


def _fully_sharded(case: Published) -> Row:
    """The one layout of a plan that was published."""
    trainer = trainer_of(devices=1, accelerator="cpu", precision=PRECISION)
    device, here = described(case.device, halves=True), torch.device("cpu")
    with ready(Llama(case.size), trainer) as own:
        batch = Loaded(_batch(case.sequences))
        module = PlannedModule(own, trainer, batch, device, here, tensor=1, devices=case.devices)
        return row_of(Choice("fully_sharded", data=case.devices), module, None)


def between(text: str, mark: str, made: str) -> str:
    """A page with new text after a mark, up to the next end."""
    try:
        return replaced(text, f"<!-- {mark} -->", "<!-- end -->", made)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_paper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("page", type=Path)
    page: Path = parser.parse_args().page
    text = between(page.read_text(), "published", "".join(beside_published(PUBLISHED)))
    page.write_text(between(text, "plans", "\n\n".join(of_plans(PLANNED))))


if __name__ == "__main__":
    main()
