"""The timelines on the pages show what the pages say of them, and can be drawn anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipes import ROOT
from tools.gallery.captions import unmet
from tools.gallery.pictures import BACKWARD, FORWARD, PICTURES, TIMELINES, busy, length, read

PAGES = ("README.md", "README.ko.md", "docs/index.md", "docs/strategies.md")


@pytest.mark.parametrize("name", TIMELINES)
def test_a_picture_shows_what_its_caption_says(name: str) -> None:
    assert unmet(name, read(PICTURES / f"{name}.svg")) == []


def test_the_pages_name_the_share_of_the_time_in_which_stages_are_busy() -> None:
    rows = read(PICTURES / "async.svg")
    share = f"{sum(busy(row, length(rows)) for row in rows) / len(rows):.0%}"
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert "pictures/async.svg" in text
        assert share in text or f"{share[:-1]} %" in text, f"{page} doesn't say {share}"


def test_the_page_names_the_durations() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text()
    assert f"sleep {1000 * FORWARD:.0f} ms in the forward and {1000 * BACKWARD:.0f} ms in the backward" in text


def test_a_picture_of_something_else_is_not_taken() -> None:
    rows = read(PICTURES / "async.svg")
    (lacking,) = unmet("async", [[span for span in rows[0] if span.kind != "backward"], *rows[1:]])
    assert lacking.startswith("stage 0 has no forward or no backward")
    (idle,) = unmet("async", [[span for span in rows[0] if span.microbatch % 4], *rows[1:]])
    assert idle.startswith("the stages are busy")
    (short,) = unmet("async", [[replace(span, end=(span.start + span.end) / 2) for span in rows[0]], *rows[1:]])[:1]
    assert short.startswith("stage 0: a forward takes")
    assert unmet("gpipe", rows) and unmet("interleaved", rows)
