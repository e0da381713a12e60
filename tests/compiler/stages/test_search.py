"""Stages in the search: within each rank's memory, the same on a busy machine, and never worse than no stages."""

from __future__ import annotations

import itertools

import pytest

import pase
from pase.errors import Infeasible, PaseError
from tests.compiler.stages.staged import SCANNED, staged


def test_each_rank_keeps_to_the_memory_limit():
    free = staged()
    most = max(s.memory_bytes for s in free.pipeline.stages)
    tight = staged(memory_limit=0.85 * most, remat="light")
    assert max(s.memory_bytes for s in tight.pipeline.stages) <= 0.85 * most
    assert tight.cost >= free.cost * (1 - 2e-3)
    assert tight.bound <= tight.cost
    with pytest.raises(Infeasible, match="no pipeline found that fits"):
        staged(memory_limit=1e6)


@pytest.mark.release
def test_a_busy_machine_gives_the_same_answer(monkeypatch):
    """Budgets count work, so a clock on which an hour passes between any two readings changes nothing."""
    small = "zoo:gpt2?layers=2&batch=16&seq=128&vocab=2048&remat=0"
    asked = {"devices": 4, "pipeline": 2, "remat": "none", "max_axes": 1}
    quiet = pase.compile(small, **asked)
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    busy = pase.compile(small, **asked)
    assert (busy.cost, busy.bound, busy.pipeline) == (quiet.cost, quiet.bound, quiet.pipeline)
    little = pase.compile(small, **asked, work=0.6)
    assert "more were not looked at, within the given work" in little.pipeline.scope
    assert little.cost >= quiet.cost * (1 - 1e-3) and not little.optimal


def test_auto_is_never_worse_than_no_stages():
    small = "zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0"
    plain = pase.compile(small, devices=4, baselines=False, max_axes=1, overlap="none")
    auto = pase.compile(small, devices=4, baselines=False, max_axes=1, pipeline="auto")
    assert auto.cost <= plain.cost and auto.bound <= auto.cost


def test_what_cannot_be_is_refused():
    for wrong in ("some", 0, 1, "1", -2):
        with pytest.raises(PaseError, match=r"pipeline: .*'none', 'auto' or a number"):
            pase.compile(SCANNED, devices=8, pipeline=wrong)
    with pytest.raises(PaseError, match=r"pipeline: 3 .* 8 devices"):
        pase.compile(SCANNED, devices=8, pipeline=3)
    with pytest.raises(Infeasible, match=r"pipeline: 8 blocks .* 16 stages"):
        pase.compile(SCANNED, devices=16, pipeline=16)
    with pytest.raises(PaseError, match=r"accumulate: .*32 .* 5 equal micro-batches"):
        pase.compile(SCANNED, devices=8, pipeline=2, accumulate=5)
