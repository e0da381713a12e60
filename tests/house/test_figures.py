"""Figures of docs/: every figure that a page asks for is drawn, and agrees with the results."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from pase.schedule.registry import Options, get_policy
from pase.schedule.simulate import evaluate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def asked() -> set[str]:
    pages = (ROOT / "docs").rglob("*.md")
    return {
        name
        for p in pages
        for name in re.findall(r"^<!-- figure: ([\w-]+) -->$", p.read_text(), re.MULTILINE)
    }


def test_every_figure_is_asked_for_and_drawn(figures: ModuleType) -> None:
    assert asked() == set(figures.FIGURES)
    for name in asked():
        (drawing,) = ElementTree.fromstring(figures.drawn(name))
        assert drawing.get("aria-label") and len(drawing) > 5
        width = float((drawing.get("viewBox") or "").split()[2])
        for bar in drawing.iter("rect"):
            assert 0 <= float(bar.get("x", 0)) <= float(bar.get("x", 0)) + float(bar.get("width", 0)) <= width


def test_bars_are_as_long_as_the_results_say(figures: ModuleType) -> None:
    drawn = ElementTree.fromstring(figures.drawn("delays"))
    found = json.loads((ROOT / "bench" / "results" / "schedule_policies.json").read_text())["vgg19_deft"]
    ddp, ours = (found[f"two links, {p}, staleness 0"]["iteration_ms"] for p in ("ddp", "ours"))
    widths = [float(bar.get("width", 0)) for bar in drawn.iter("rect")]
    assert widths[0] / widths[2] == pytest.approx(ddp / ours, rel=0.01)


def test_the_picture_of_orders_shows_what_it_claims(figures: ModuleType) -> None:
    took = {
        p: evaluate(figures.toy(), get_policy(p).make(figures.toy(), Options())).iteration_s
        for p in ("fifo", "tac", "ours")
    }
    assert took["ours"] < took["tac"] < took["fifo"]
