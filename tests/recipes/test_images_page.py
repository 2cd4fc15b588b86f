"""docs/images.md: its commands, as printed and one after the other, lead from a folder of images to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes import ROOT, commands, record
from tests.recipes.runs import in_the_pool
from tests.recipes.test_pretrained_page import run_page
from tests.recipes.tiny import images
from tests.test_pages import commands as commands_of
from tools.workers.pool import WorkerPool

pytestmark = pytest.mark.timm

PAGE = commands_of(ROOT / "docs" / "images.md")
SMALL = [
    "data.batch_size=4", "trainer.max_steps=2", "scheduler.warmup_steps=1", "trainer.limit_val_batches=1.0",
    "logger=none", "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip


def test_its_commands_do_what_it_says(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pool's processes, with fewer steps."""
    import timm

    images(tmp_path / "photos", classes=3, each=6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "launch", lambda config, choices, overrides: in_the_pool(pool, config, overrides))
    assert len(PAGE) == 6
    run_page(pool, tmp_path, PAGE, SMALL)
    scores = [record.read_metrics(folder) for folder in sorted((tmp_path / "runs" / "vit" / "evaluate").iterdir())]
    assert len(scores) == 2 and scores[0].keys() == {"val_loss", "val_acc", "test_loss", "test_acc"}
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)  # float32
    opened = timm.create_model("local-dir:my-vit", pretrained=True).eval()
    with torch.no_grad():
        assert opened(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
