"""Tables, bars, key figures and legends of pages and notebooks."""

from __future__ import annotations

import re

from pase.api import Comparison
from pase.pages.parts import bar, cards, key, table
from tests.pages.elements import Elements
from tests.questions.reports import gpt2_plan


def test_what_python_returns_shows_itself_in_a_notebook() -> None:
    plan = gpt2_plan()
    compared = Comparison([("ours", plan), ("<b>", plan)])
    assert plan.bucket_plan is not None
    for shown in (compared, plan.bucket_plan):
        made = shown._repr_html_()
        assert Elements(made).found[0][0] == "div" and "<b>" not in made
    assert "does not fit" not in compared._repr_html_() and list(compared) == [("ours", plan), ("<b>", plan)]


def test_widths_of_a_bar_are_shares_of_the_whole() -> None:
    """Parts without extent, and all parts of an empty whole, are left out."""
    drawn = bar([("compute", 1.0), ("idle", 0.0), ("update", 3.0)], 8.0)
    assert re.findall(r"f-(\w+)' style='width:([\d.]+)%", drawn) == [
        ("compute", "12.50"),
        ("update", "37.50"),
    ]
    assert bar([("compute", 1.0)], 0.0) == ""


def test_names_in_tables_and_legends_are_text() -> None:
    made = table("a's <b>", ["name", "bytes>", "|"], [["x", "3", "bar"]]) + key([("compute", "<b>")])
    found = Elements(made).found
    assert [a.get("class") for t, a in found if t == "th"] == ["", "n", "b"]
    assert "b" not in {t for t, _ in found} and "&lt;b&gt;" in made


def test_key_figures_have_a_remark_if_there_is_one() -> None:
    found = Elements(cards([("cost", "3 ms", "a step"), ("devices", "8", "")])).found
    assert [t for t, _ in found] == ["dl", "div", "dt", "dd", "small", "div", "dt", "dd"]


def test_a_comparison_prints_as_a_table() -> None:
    plan = gpt2_plan()
    title, *rows = str(Comparison([("ours", plan), ("zero_2", plan)])).splitlines()
    assert title.startswith(plan.model) and [r.split("  ")[0] for r in rows] == ["ours", "zero 2"]
    assert all("×1.000" in r for r in rows) and str(Comparison()) == "nothing compared"
