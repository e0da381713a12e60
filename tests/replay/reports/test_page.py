"""The page of a diagnosis: every finding is on it as text, and of many tasks the longest are drawn."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.reports import page
from pase.replay.reports.diagnose import Diagnosis, diagnose_run
from pase.replay.reports.page import diagnosis_page
from pase.replay.reports.report import diagnosis_report
from tests.replay.runs import measured


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    run = simulate(ImaginedRun(ranks=2, iterations=3, layers=4, slow_rank=1, slow_by=1.5))
    return diagnose_run(measured(tmp_path_factory.mktemp("page"), run))


def test_every_finding_is_on_the_page_as_text(diagnosis: Diagnosis) -> None:
    report = diagnosis_report("<run>", diagnosis)
    report["findings"][0]["title"] = "<script>alert()</script>"
    report["problems"] = ["a & b"]
    made = diagnosis_page(diagnosis, report)
    assert len(re.findall(r"<div class='finding\b", made)) == len(diagnosis.findings) > 1
    assert "&lt;script&gt;alert()" in made and "<script>alert()" not in made and "<li>a &amp; b" in made
    assert "<title>&lt;run&gt;: " in made
    assert all(f">rank {rank}" in made for rank in (0, 1))
    assert "longest of" not in made


def test_boxes_of_the_timeline_have_the_user_s_names(diagnosis: Diagnosis) -> None:
    named = page._named(diagnosis)
    g = diagnosis.run.graph
    assert named and all(int(g.event[i]) >= 0 for i in named)
    drawn, _ = page._drawn(diagnosis)
    assert {n[:200] for n in named.values()} & set(drawn["labels"])


def test_of_many_tasks_the_longest_are_drawn(diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_MOST", 5)
    assert re.search(
        r"The 5 longest of \d+ tasks are drawn\.", diagnosis_page(diagnosis, diagnosis_report("x", diagnosis))
    )


def test_the_answer_comes_first_and_tables_of_ops_last(diagnosis: Diagnosis) -> None:
    report = diagnosis_report("runs/monday", diagnosis)
    report["problems"] = ["cut"]
    report["plan"] = {"rows": [], "assumptions": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "against_section", lambda plan: "")
        made = diagnosis_page(diagnosis, report)
    slowest = max(report["spent"], key=lambda x: x["step_s"])["rank"]
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", made) == [
        "Where the time goes",
        "Plan against trace",
        "What would save time",
        "What collectives send",
        "The replayed iteration",
        f"Kinds of work and ops of rank {slowest}",
        "Notes on the traces",
    ]
    assert f"<title>monday: {report['measured_s'] * 1e3:.3g} ms an iteration on " in made
    assert f"<p class='verdict'>{html.escape(report['verdict'])}</p>" in made
    assert "of its iteration" in report["verdict"] and report["findings"][0]["title"] in report["verdict"]
    # Within the section, what saves most comes first.
    saved = [f["cost_s"] for f in report["findings"]]
    titles = [html.escape(f["title"]) for f in report["findings"]]
    assert saved == sorted(saved, reverse=True)
    assert (
        re.findall(r"<h3>([^<]*)</h3>", made[made.index("id='findings'") : made.index("id='sent'")]) == titles
    )


def test_gains_of_one_iteration_have_an_unknown_error(tmp_path: Path) -> None:
    for iterations, tested in ((1, False), (4, True)):
        run = simulate(ImaginedRun(ranks=1, iterations=iterations, layers=4))
        d = diagnose_run(measured(tmp_path / str(iterations), run))
        report = diagnosis_report("x", d)
        assert report["tested"] == tested and any(f["cost_s"] for f in report["findings"])
        assert ("%, error unknown)</span>" in diagnosis_page(d, report)) != tested


def test_what_to_do_about_one_kind_of_collective_is_said_once(tmp_path: Path) -> None:
    """If all are of one kind, to make them free and to hide them behind compute save the same time."""
    d = diagnose_run(measured(tmp_path, simulate(ImaginedRun(ranks=3, iterations=4))))
    by_kind = {f.kind: f for f in d.findings}
    assert "overlap" not in by_kind and "batch in two halves" in by_kind["exposed-communication"].detail
