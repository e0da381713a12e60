"""Every schedule is sound and takes the published time at equal stages, with the published activations in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.pipeline.order import order_of
from pase.pipeline.registry import SCHEDULES, Discipline, schedule
from pase.pipeline.simulate import in_flight, peak_bytes, simulate
from pase.pipeline.types import Action, Kind, Schedule, StageTimes

# Whole numbers, so that equality is exact.
whole = st.integers(1, 9).map(float)
sizes = {"p": st.integers(1, 6), "m": st.integers(1, 20)}


def chunks_of(d: Discipline) -> list[int]:
    low, high = d.chunks
    return [v for v in (1, 2, 3) if v >= low and (not high or v <= high)]


CASES = [(name, v) for name, d in SCHEDULES.items() for v in chunks_of(d)]


def step_s(name, p, m, v, f, i, w, send=0.0):  # type: ignore[no-untyped-def]
    return simulate(
        schedule(name, p, m, v), StageTimes.of([f] * (p * v), i, w, ranks=p, send=send), kernel="numpy"
    ).step_s


@pytest.mark.parametrize(("name", "v"), CASES)
@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_every_schedule_does_all_of_its_work_and_never_deadlocks(name, v, p, m):
    d = SCHEDULES[name]
    if d.refuses(p, m, v):
        with pytest.raises(PaseError, match=name):
            schedule(name, p, m, v)
        return
    s = schedule(name, p, m, v)
    order = order_of(s)  # complete and free of deadlock, or an error
    assert order.kind.size == sum(map(len, s.orders))
    done = {(a.stage, a.micro) for o in s.orders for a in o if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    assert len(done) == p * v * m
    for r in range(p):  # all activations are freed
        assert not in_flight(s, r)[-1].any()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@given(f=whole, b=whole, **sizes)
def test_one_stage_a_rank(name, p, m, f, b):
    assert step_s(name, p, m, 1, f, b, 0.0) == (m + p - 1) * (f + b)
    held = {
        "gpipe": lambda r: m,
        "1f1b": lambda r: min(m, p - r),
        "eager-1f1b": lambda r: min(m, 2 * (p - r) - 1),
    }
    peak = peak_bytes(schedule(name, p, m), np.ones(p))
    assert peak.tolist() == [held[name](r) for r in range(p)]


@given(f=whole, b=whole, v=st.integers(2, 4), p=st.integers(1, 5), k=st.integers(1, 4))
def test_interleaved_and_circular(f, b, v, p, k):
    m = p * k
    assert step_s("interleaved", p, m, v, f, b, 0.0) == v * m * (f + b) + (p - 1) * (f + b)
    assert step_s("circular", p, m, v, f, b, 0.0) == (m * v + p - 1) * (f + b)
    # Published, in stages of v chunks: p (1 + (p - 1) / (p v)), but at most all micro-batches.
    first = peak_bytes(schedule("interleaved", p, m, v), np.ones(p * v))[0]
    assert first == min(p * v + p - 1, m * v)
    assert (peak_bytes(schedule("circular", p, m, v), np.ones(p * v)) == m * v + p - 1).all()


def period_s(name, p, m, v, f, i, w):  # type: ignore[no-untyped-def]
    t = StageTimes.of([f] * (p * v), i, w, ranks=p)
    return simulate(schedule(name, p, m, v), t, kernel="numpy").period_s


@given(w=whole, f=whole, i=whole, p=st.integers(1, 6), more=st.integers(0, 7))
def test_zero_bubble(w, f, i, p, more):
    """If weight gradients take no longer than the other actions, they fill the drain of each rank."""
    f, i, m = max(f, w), max(i, w), 2 * p + more
    assert step_s("zb-h1", p, m, 1, f, i, w) == m * (f + i + w) + (p - 1) * (f + i - w)
    assert period_s("zb-h2", p, m, 1, f, i, w) == m * (f + i + w) + (p - 1) * (f + i - 2 * w)


@given(t=whole, p=st.integers(1, 5), more=st.integers(0, 7))
def test_vees(t, p, more):
    m = 2 * p + more
    assert period_s("zb-v", p, m, 2, t, t, t) == 2 * m * 3 * t
    # The step also has the last rank's fill. In the period, the next step's first forwards cover it.
    assert step_s("zb-v", p, m, 2, t, t, t) == 2 * m * 3 * t + (p - 1) * t


@given(w=whole, f=whole, p=st.integers(1, 6), more=st.integers(0, 7))
def test_dualpipev_with_forward_and_backward_one_after_the_other(w, f, p, more):
    f, m = max(f, w), 2 * p + more
    assert step_s("dualpipev", p, m, 2, f, f, w) == 2 * m * (f + f + w) + (p - 1) * (f + f - w)


@pytest.mark.parametrize("p", [1, 2, 4, 6])
def test_activations_of_zero_bubble_schedules(p):
    """A rank holds whole micro-batches, and parts of those that still need their weight gradients."""
    m = 4 * p
    kept, left = np.ones(p), np.full(p, 0.25)
    h1, h2 = (peak_bytes(schedule(name, p, m), kept, left) for name in ("zb-h1", "zb-h2"))
    for r in range(p):
        assert h1[r] == (p - r) + r * 0.25
        assert h2[r] == (2 * (p - r) - 1) + 2 * r * 0.25
    assert (peak_bytes(schedule("zb-v", p, m, 2), np.ones(2 * p)) <= 2 * p).all()
    assert (peak_bytes(schedule("dualpipev", p, m, 2), np.ones(2 * p)) <= 2 * p + 1).all()


@given(p=st.integers(2, 6), m=st.integers(1, 20), f=whole, b=whole)
def test_transfers_cost_1f1b_at_every_micro_batch_and_eager_only_on_the_way(p, m, f, b):
    c = min(f, b) / 8  # much shorter than compute
    m *= p
    assert step_s("gpipe", p, m, 1, f, b, 0.0, c) == (m + p - 1) * (f + b) + 2 * c * (p - 1)
    assert step_s("eager-1f1b", p, m, 1, f, b, 0.0, c) == (m + p - 1) * (f + b) + 2 * c * (p - 1)
    if f == b:
        plain = step_s("1f1b", p, m, 1, f, b, 0.0, c) - (m + p - 1) * (f + b)
        assert plain == 2 * c * ((p - 1) * m // p + p - 2) or p == 2


def test_both_kernels_come_to_the_same_bits():
    rng = np.random.default_rng(3)
    for name, v in CASES:
        s = schedule(name, 4, 8, v)
        t = StageTimes.of(
            rng.random(4 * v),
            rng.random(4 * v),
            rng.random(4 * v),
            ranks=4,
            recompute=rng.random(4 * v),
            send=rng.random(4 * v - 1),
            before=rng.random(4),
            after=rng.random(4),
        )
        one, two = (simulate(s, t, kernel=k) for k in ("numba", "numpy"))
        assert one.end.tobytes() == two.end.tobytes() and one.step_s == two.step_s
        assert (one.path.runs == two.path.runs).all() and (one.path.crossed == two.path.crossed).all()
        if not s.lockstep:
            assert one.path.seconds(t) == pytest.approx(one.step_s)


def test_a_deadlock_is_named():
    f, b = Kind.FORWARD, Kind.BACKWARD
    swapped = Schedule(
        name="crossed",
        micro_batches=2,
        rank_of=(0, 1),
        orders=(
            (Action(0, f, 0), Action(0, b, 0), Action(0, f, 1), Action(0, b, 1)),
            (Action(1, f, 0), Action(1, f, 1), Action(1, b, 0), Action(1, b, 1)),
        ),
    )
    lost = replace(swapped, orders=(swapped.orders[0], swapped.orders[1][:3]))
    early = replace(swapped, orders=(swapped.orders[0], (Action(1, b, 0), *swapped.orders[1])))
    for wrong, named in (
        (swapped, {"0B0", "1I0", "1F1"}),
        (lost, {"stage 1", "micro-batch 1"}),
        (early, {"rank 1", "1B0"}),
    ):
        with pytest.raises(PaseError) as e:
            order_of(wrong)
        assert e.value.where == "schedule 'crossed'" and all(name in e.value.what for name in named)


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(PaseError, match=r"'1fb'.*'1f1b'"):
        schedule("1fb", 2, 4)
    for name, micro_batches, wrong in (("interleaved", 6, "not 6"), ("1f1b", 8, "not 2")):
        with pytest.raises(PaseError) as e:
            schedule(name, 4, micro_batches, 2)
        assert e.value.where == f"schedule '{name}'" and e.value.what.endswith(wrong) and e.value.fix
