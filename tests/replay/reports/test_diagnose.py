"""A diagnosis: the most expensive finding first, and nothing that is not worth reading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.reports import diagnose
from pase.replay.reports.diagnose import Diagnosis, Finding, diagnose_run
from tests.replay.runs import measured


def finding(title: str, cost_ns: float = 0.0, measured_ns: float = 0.0) -> Finding:
    return Finding(kind="k", title=title, detail="<b>do</b>", cost_ns=cost_ns, measured_ns=measured_ns)


def test_findings_are_in_order_of_their_cost_and_small_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = measured(tmp_path, simulate(ImaginedRun(ranks=1, iterations=3)))
    whole = m.measured_ns[0, m.steady()[0]]
    looks = (
        lambda scene: [finding("cheap", 0.1 * whole), finding("dear", 0.2 * whole)],
        lambda scene: [
            finding("long", 0.1 * whole, 0.3 * whole),
            finding("tiny", 0.004 * whole, 0.004 * whole),
        ],
    )
    monkeypatch.setattr(diagnose, "LOOKS", looks)
    monkeypatch.setattr(diagnose, "advice", lambda scene, spent: [])
    monkeypatch.setattr(diagnose, "remarks", lambda run: [finding("remark")])
    d = diagnose_run(m)
    assert [f.title for f in d.findings] == ["dear", "long", "cheap", "remark"]
    assert [b.rank for b in d.breakdowns] == [0] and not d.stragglers
    assert d.iteration_ns == pytest.approx(whole, rel=0.01)


def test_a_notebook_shows_texts_as_text() -> None:
    run: Any = SimpleNamespace(measured_ns=2e6, replayed_ns=1.5e6)
    shown = Diagnosis(run=run, findings=(finding("a<script>", 5e5, 1e6),))._repr_html_()
    assert "<script>" not in shown and "a&lt;script&gt;" in shown and "&lt;b&gt;do" in shown
    assert "2.00 ms" in shown and "1.50 ms" in shown and ">0.50<" in shown and ">1.00<" in shown
