"""A priced strategy as text: its numbers with units, and a warning where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pase
from pase.plan.table import bytes_text, cost_text
from pase.stated.table import as_lines, difference
from tests.stated.prices import price


def test_every_part_of_the_step_has_its_line() -> None:
    p = price("fsdp=8,remat=full")
    text = as_lines("a Llama", p)
    assert text[0].startswith("a Llama as fsdp=8") and "8 devices of h100x8" in text[0]
    assert cost_text(p.step_s, "s") in text[1] and f" {p.bar} " in text[1] and str(p.throughput) in text[1]
    assert all(f"{k} {cost_text(v, 's')}" in text[2] for k, v in p.seconds.items() if v > 0)
    assert text[3].startswith(
        "runs   1 micro-batch of 2 on each of 8 data-parallel ranks, recomputation full"
    )
    sent = next(line for line in text if line.startswith("sends"))
    assert all(f"{k} {cost_text(v, 's')}" in sent for k, v in p.collectives_s.items())
    memory = next(line for line in text if line.startswith("memory"))
    held, there = p.memory.total - p.memory.reserve, p.device_memory - p.memory.reserve
    assert f"{bytes_text(held)} of {bytes_text(there)}" in memory
    assert f"adds   zero=3 · executor {p.program}" in as_lines("it", replace(p, added=("zero=3",)))
    assert not any(line.startswith(("stages", "WARNING")) for line in text)


def test_stages_have_a_line_of_their_own_and_what_does_not_fit_a_warning() -> None:
    p = price("dp=2,tp=2,pp=2,micro=1", program="megatron")
    assert p.pipeline is not None
    assert any(
        line.startswith("stages 2 of 1 chunks: bubble") and f"{p.pipeline.bubble:.1%}" in line
        for line in as_lines("it", p)
    )
    hint = "       more chunks (vp=2, 4, …) shorten the bubble"
    for bubble, hinted in ((0.1, False), (0.4, True)):
        assert (hint in as_lines("it", replace(p, pipeline=replace(p.pipeline, bubble=bubble)))) == hinted
    tight = replace(p, device_memory=int(p.memory.total) - 1)
    assert not tight.fits and "WARNING it does not fit" in as_lines("it", tight)


def test_work_of_which_a_framework_has_none_is_no_communication() -> None:
    """A difference has the kinds of work of both prices."""
    p = price("fsdp=8")
    plan = pase.compile(
        "zoo:llama3_8b?layers=2&batch=8&seq=64&vocab=512", devices=8, mesh="8", baselines=False
    )
    attention = sum(w.cost for n in plan.nodes for w in n.work if w.kind == "attention")
    less = {k: v for k, v in p.kernels_s.items() if k != "attention"}
    found = difference(replace(p, kernels_s=less), plan)
    assert attention > 0 and found["attention"] == pytest.approx(-attention)
    assert sum(found.values()) == pytest.approx(p.step_s - plan.cost)
