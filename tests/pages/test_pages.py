"""Pages are well-formed, need no network, run no other scripts, and are readable in light and dark.

bench/pages/screenshots.py checks them in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pase
from pase.api import Comparison, Plan
from pase.pages.charts import Roof, WorkPoint, areas, roofline
from pase.pages.parts import table
from pase.pages.shell import Section, page
from pase.pages.streams import StreamBox, drawn_streams
from pase.plan.step_memory import step_memory
from pase.questions.explain import explain
from pase.questions.report import report_page
from pase.questions.report_data import PARAMETERS, layer_paths, priced_step
from pase.questions.report_pipeline import drawn_schedule
from tests.command import printed

VOID = {"meta", "link", "input", "br"}
OPTIONAL = {"li", "tr", "td", "th", "dt", "dd", "p"}
"""Elements whose end tag is optional."""


class Elements(HTMLParser):
    """Collects every start tag with its attributes. Asserts that every element is closed, and only if it is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not [t for t in self.open if t not in OPTIONAL], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in OPTIONAL:
            self.open.pop()
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = data


@pytest.fixture(scope="module")
def plan() -> Plan:
    return pase.compile("zoo:gpt2?layers=2&batch=16", devices=8, mesh="2x4", baselines=False)


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return report_page(explain(plan, time_limit=0))


def test_the_page_says_its_language_and_needs_no_network(text: str) -> None:
    found = Elements(text).found
    assert ("html", {"lang": "en"}) in found
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found
    outside = [v for _, a in found for k, v in a.items() if k in ("src", "href") and v and v[0] != "#"]
    assert outside == ["data:,"]
    (policy,) = [a["content"] or "" for t, a in found if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_every_section_is_listed_and_ids_are_unique(text: str) -> None:
    found = Elements(text).found
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(set(ids)) == len(ids)
    links = {(a["href"] or "")[1:] for t, a in found if t == "a"}
    assert links - {"main"} == {a["id"] for t, a in found if t == "section"}
    named = [a for t, a in found if t in ("svg", "button", "nav") and a.get("class") != "grid"]
    assert named and all(a.get("aria-label") or t == "button" for t, a in found if t in ("svg", "nav"))


def test_what_comes_from_a_file_is_text() -> None:
    bad = "</script><script>alert(1)</script><b>"
    made = page(
        title=bad,
        lead="",
        sections=[Section(anchor="a", title=bad, body=table(bad, [bad], []))],
        data={"name": bad},
    )
    elements = Elements(made)
    assert [t for t, _ in elements.found].count("script") == 2
    held = made.partition("id='data'>")[2].partition("</script>")[0]
    assert json.loads(held) == {"name": bad}


def test_a_page_that_is_printed_commands_no_terminal() -> None:
    bad = "k\x1b[2J\x9b2J\x07"
    made = page(
        title=bad,
        lead="",
        sections=[Section(anchor="a", title=bad, body=bad)],
        data={"name": "a\tb", "k": bad},
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", made) and made.count("\ufffd[2J") >= 3


def contrast(a: str, b: str) -> float:
    """The contrast of two colours #rrggbb by WCAG 2.1, from 1 to 21."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    """WCAG AA asks for a contrast of 4.5 for text, in light and in dark."""
    sheet = resources.files("pase.pages").joinpath("page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--(\w+): light-dark\((#\w{6}, #\w{6})\)", sheet))
    assert len(colours) > 10
    for side in (0, 1):
        of = {name: pair.split(", ")[side] for name, pair in colours.items()}
        for ground in ("bg", "panel"):
            low = {
                n: round(contrast(c, of[ground]), 2)
                for n, c in of.items()
                if n not in ("bg", "panel", "line")
            }
            assert all(c >= 4.5 for c in low.values()), (side, ground, low)


def test_the_model_is_whole_in_the_page(plan: Plan, text: str) -> None:
    """The page has every node once and every collective at its node."""
    held = json.loads(text.partition("id='data'>")[2].partition("</script>")[0])
    assert sorted(held["order"]) == list(range(len(plan.nodes)))
    assert [n["name"] for n in held["nodes"]] == [n.name for n in plan.nodes]
    assert sorted(m for n in held["nodes"] for m in n["moves"]) == list(range(len(plan.collectives)))
    assert any(n["reads"] for n in held["nodes"]) and all(n["path"] for n in held["nodes"])


def test_layers_are_those_of_the_model(plan: Plan) -> None:
    paths = layer_paths(plan.nodes)
    products = [n.name for n in plan.nodes if n.op == "matmul" and n.name.startswith("blocks.attention")]
    assert products and {tuple(paths[p]) for p in products} == {("blocks", "attention")}
    assert paths["blocks.ff.w1"] == ["blocks", "ff", PARAMETERS]
    order = [n for n in paths if paths[n][-1] != PARAMETERS]
    assert order == [n.name for n in plan.nodes if n.op != "parameter"]


@pytest.mark.parametrize("how", ["", "&remat=0"])
def test_memory_over_the_step_comes_to_what_is_counted(how: str) -> None:
    p = pase.compile(f"zoo:gpt2?layers=3&batch=16{how}", devices=4, mesh="2x2", baselines=False)
    course = step_memory(p)
    assert course is not None
    held, end = course.held, course.times.index(course.forward)
    slack = len(p.nodes)
    again = p.memory.activations - sum(n.keeps.get("activations", 0) for n in p.nodes)
    assert held["activations"][end] == pytest.approx(p.memory.activations - again, abs=slack)
    assert held["gradients"][-1] == pytest.approx(p.memory.gradients, abs=slack)
    assert held["activations"][-1] == pytest.approx(0, abs=slack)
    assert course.times[-1] == pytest.approx(
        p.cost - sum(n.cost.update for n in p.nodes) - sum(x.cost for x in _on_parameters(p)), rel=0.05
    )
    assert course.peak <= p.memory.total - p.memory.buffers + slack
    assert all(a <= b for a, b in pairwise(course.times))


def _on_parameters(p: Plan) -> list[Any]:
    parameters = {n.name for n in p.nodes if n.op == "parameter"}
    return [c for c in p.collectives if c.node in parameters]


def test_the_priced_step_is_as_long_as_its_price(plan: Plan) -> None:
    drawn = priced_step(plan)
    assert drawn["end"] / 1e9 == pytest.approx(plan.cost + plan.hidden, rel=1e-3)
    for s in drawn["streams"]:
        ends = [a + n for a, n in zip(s["start"], s["length"], strict=True)]
        assert all(b >= e for e, b in zip(ends, s["start"][1:], strict=False))


def test_streams_are_in_order_and_name_each_label_once() -> None:
    boxes = [
        StreamBox(label="b", kind=0, start_ns=5, length_ns=1),
        StreamBox(label="b", kind=0, start_ns=1, length_ns=2),
    ]
    drawn = drawn_streams("t", {"s": boxes}, [("k", "compute")], end_ns=9, hint="")
    assert drawn["streams"] == [
        {"name": "s", "start": [1, 5], "length": [2, 1], "label": [0, 0], "kind": [0, 0]}
    ]
    assert drawn["labels"] == ["b"]


def test_charts_are_drawn() -> None:
    point = WorkPoint(intensity=10.0, rate=1e12, share=0.5, colour="compute", title="a & b", node=3)
    drawn = roofline([point], [Roof(name="peak", rate=1e13, bandwidth=1e12)])
    assert Elements(drawn).found[0][0] == "svg" and "a &amp; b" in drawn and "data-node='3'" in drawn
    stacked = areas([0.0, 1.0], [("x", "compute", [1.0, 2.0])], [("limit", 3.0)], label="l")
    assert Elements(stacked).found[0][1]["aria-label"] == "l"


def test_a_layout_of_before_graphs_were_kept_has_its_page(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "layout.json")
    data = json.loads((tmp_path / "layout.json").read_text())
    data["machine"]["name"] = "a machine of their own"
    for n in data["strategy"]:
        for key in ("reads", "work", "keeps", "kept_for_recompute"):
            n.pop(key, None)
    (tmp_path / "layout.json").write_text(json.dumps(data))
    printed("report", tmp_path / "layout.json", "-o", tmp_path / "page.html")
    made = (tmp_path / "page.html").read_text()
    assert made.lower().count("compile it again") >= 2
    Elements(made)


def test_what_python_returns_shows_itself_in_a_notebook(plan: Plan) -> None:
    compared = Comparison([("ours", plan), ("<b>", plan)])
    assert plan.bucket_plan is not None
    for shown in (compared, plan.bucket_plan):
        made = shown._repr_html_()
        assert Elements(made).found[0][0] == "div" and "<b>" not in made
    assert "does not fit" not in compared._repr_html_() and list(compared) == [("ours", plan), ("<b>", plan)]


@pytest.mark.parametrize("how", ["1f1b", "circular"])
def test_a_pipelines_page_shows_a_ranks_work(how: str) -> None:
    name, asked = "zoo:gpt2?layers=4&batch=16", {"devices": 4, "pipeline": "2", "stage_schedule": how}
    p = pase.compile(name, baselines=False, **asked)
    for n in p.nodes:
        assert sum(w.cost for w in n.work) == pytest.approx(n.cost.compute + n.cost.update, rel=1e-9)
        sent = sum(c.cost for c in p.collectives if c.node == n.name)
        assert sent == pytest.approx(n.cost.communication, rel=1e-9)
    if how == "1f1b":  # hoisted collectives overlap compute; a scan waits for all that it reads
        assert 0 < p.hidden < sum(n.cost.communication for n in p.nodes)
    else:
        assert p.hidden == 0
    assert step_memory(p) is None
    Elements(page := report_page(explain(p)))
    assert p.pipeline is not None and "Schedule of the stages" in page
    drawn = drawn_schedule(p)
    assert drawn is not None and drawn["end"] == pytest.approx(p.cost * 1e9, rel=1e-6)
    ranks = drawn["streams"]
    assert [s["name"] for s in ranks] == [f"rank {r}" for r in range(p.pipeline.degree)]
    for s in ranks:  # boxes do not overlap, and every micro-batch of its stages has one forward
        ends = [a + n for a, n in zip(s["start"], s["length"], strict=True)]
        assert all(end <= begin + 2 for end, begin in zip(ends, s["start"][1:], strict=False))
        forward = sum("forward" in drawn["labels"][i] for i in s["label"])
        assert forward == p.pipeline.micro_batches * p.pipeline.chunks
    older = replace(p.pipeline, before_s=())
    assert drawn_schedule(replace(p, pipeline=older)) is None
