"""A report on a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pase
from pase.plan.step_memory import step_memory
from pase.questions.explain import explain
from pase.questions.report import report_page
from pase.questions.report_pipeline import drawn_schedule
from tests.pages.elements import Elements


@pytest.mark.some(1)
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
