"""Pages are well-formed, need no network, run no other scripts, and are readable in light and dark.

bench/pages/screenshots.py checks them in a browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from pase.api import Plan
from tests.command import printed
from tests.pages.elements import Elements


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


def test_the_model_is_whole_in_the_page(plan: Plan, text: str) -> None:
    """The page has every node once and every collective at its node."""
    held = json.loads(text.partition("id='data'>")[2].partition("</script>")[0])
    assert sorted(held["order"]) == list(range(len(plan.nodes)))
    assert [n["name"] for n in held["nodes"]] == [n.name for n in plan.nodes]
    assert sorted(m for n in held["nodes"] for m in n["moves"]) == list(range(len(plan.collectives)))
    assert any(n["reads"] for n in held["nodes"]) and all(n["path"] for n in held["nodes"])


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


def test_the_answer_and_five_strategies_come_first(text: str, plan: Plan) -> None:
    """The other strategies are folded, the times of a page share the plan's exposed communication, and the parts for
    screens only are not printed."""
    first, _, rest = text.partition("id='strategies'")
    assert "class='verdict'" in first and "exposed communication" in first
    shown = rest.partition("<details>")[0].partition("</section>")[0]
    assert shown.count("<tr>") <= 8
    screens = {a["id"] for t, a in Elements(text).found if t == "section" and a.get("class") == "screen"}
    assert {"model", "layers", "storage"} <= screens
