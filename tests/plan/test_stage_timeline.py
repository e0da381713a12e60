"""The timeline of two stages under 1F1B, by hand.

Forward takes 1 s, backward 2 s, a send 0.5 s. Rank 0 gathers weights for 0.25 s, and rank 1 sums gradients for 0.5 s.
"""

from __future__ import annotations

import pytest

from pase.plan.stage_timeline import simulated_stages, stage_timeline
from tests.plan.plans import mlp, stage, staged

SECOND = 1_000_000_000
WORK = {
    (0, "0: forward, stage 0"): (0.25, 1.0),
    (0, "1: forward, stage 0"): (1.25, 1.0),
    (1, "0: forward, stage 1"): (1.75, 1.0),
    (1, "0: backward, stage 1"): (2.75, 2.0),
    (1, "1: forward, stage 1"): (4.75, 1.0),
    (1, "1: backward, stage 1"): (5.75, 2.0),
    (0, "0: backward, stage 0"): (5.25, 2.0),
    (0, "1: backward, stage 0"): (8.25, 2.0),
    (0, "before the first micro-batch: weights are gathered"): (0.0, 0.25),
    (1, "after the last micro-batch: sums of gradients, the update"): (7.75, 0.5),
}


def test_the_work_of_both_ranks() -> None:
    made = stage_timeline(staged())
    assert made is not None
    found = {
        (e.rank, e.name): (e.start_ns / SECOND, e.duration_ns / SECOND) for e in made if e.lane == "work"
    }
    assert found.keys() == WORK.keys()
    assert all(found[k] == pytest.approx(WORK[k]) for k in WORK)
    assert {(m.rank, m.end_ns) for m in made.marks} == {(0, 10.25 * SECOND), (1, 10.25 * SECOND)}
    assert made.hosts == {0: "devices 0 to 3", 1: "devices 4 to 7"}


def test_what_is_sent_and_what_waits_for_it() -> None:
    made = stage_timeline(staged())
    assert made is not None
    sends = sorted((e for e in made if e.kind == "collective"), key=lambda e: e.start_ns)
    assert [(e.rank, e.start_ns / SECOND, e.name) for e in sends] == [
        (0, 1.25, "activations of micro-batch 0, stage 0 to 1"),
        (0, 2.25, "activations of micro-batch 1, stage 0 to 1"),
        (1, 4.75, "gradients of micro-batch 0, stage 1 to 0"),
        (1, 7.75, "gradients of micro-batch 1, stage 1 to 0"),
    ]
    waiting = {e.correlation: e for e in made if e.lane == "work" and e.correlation >= 0}
    for send in sends:
        assert send.nbytes == 8
        assert waiting[send.correlation].start_ns >= send.start_ns + send.duration_ns


def test_memory_is_that_of_the_micro_batches_in_flight() -> None:
    made = stage_timeline(staged())
    assert made is not None
    most = {0: 0, 1: 0}
    for e in made:
        if e.kind == "memory" and e.name.startswith("activations"):
            most[e.rank] = max(most[e.rank], e.nbytes)
    assert most == {0: 200, 1: 100}
    fixed = {e.rank: e.nbytes for e in made if e.kind == "memory" and e.name.startswith("weights")}
    assert fixed == {0: 800, 1: 900}


def test_layouts_without_times_have_no_timeline() -> None:
    assert simulated_stages(mlp()) is None
    assert stage_timeline(staged(stages=(stage(0, send_s=None), stage(1)))) is None
    assert stage_timeline(staged(before_s=())) is None
