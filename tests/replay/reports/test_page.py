"""The page of a diagnosis: every finding is on it as text, and of many tasks the longest are drawn."""

from __future__ import annotations

import re

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
    assert "<title>Why &lt;run&gt; takes" in made
    assert all(f"Rank {rank}: " in made for rank in (0, 1))
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
