"""The page of large models on paper: in a small form."""

from __future__ import annotations

import pytest

from tools.on_paper import SIZES, Published, beside_published, between, of_plans


def test_tables_are_written_into_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
    monkeypatch.setitem(SIZES, "small", small)
    (plan,) = of_plans([("small", 2)])
    assert "### small on 2 H100" in plan and len([line for line in plan.splitlines() if "GiB" in line]) > 1
    text = "".join(beside_published([Published("small", "a100", 2, 4, 1234, "others")]))
    planned, again = (float(cell.replace(",", "")) for cell in text.splitlines()[-1].split("|")[3:5])
    assert again < planned and "1,234" in text
    page = between("a\n<!-- plans -->\nold\n<!-- end -->\nb", "plans", "new")
    assert page == "a\n<!-- plans -->\n\nnew\n\n<!-- end -->\nb"
    with pytest.raises(SystemExit, match="plans"):
        between("nothing", "plans", "new")
