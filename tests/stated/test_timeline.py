"""Passes and pipelines, compared with published formulas for equal stages and with a simulation for unequal ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.pipeline.registry import schedule as listed
from pase.pipeline.simulate import in_flight
from pase.stated.timeline import Unit, passes, pipelined, stage_layers

seconds = st.floats(0.01, 10.0)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [8, 16])
def test_equal_stages_take_the_published_time(p, m):
    f, b = 1.0, 2.0
    for schedule in ("gpipe", "1f1b"):
        pipe = pipelined([f] * p, [b] * p, m, 1, 0.0, schedule, sends_overlap=True)
        assert pipe.step_s == pytest.approx((m + p - 1) * (f + b))
        assert pipe.in_flight == (m if schedule == "gpipe" else min(m, p))
        assert pipe.in_flight_last == (m if schedule == "gpipe" else 1)
    for v in (2, 4):
        pipe = pipelined([f] * p, [b] * p, m, v, 0.0, "interleaved", sends_overlap=True)
        assert pipe.step_s == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)
        assert pipe.bubble == pytest.approx(1 - m * (f + b) / pipe.step_s)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
@pytest.mark.parametrize("p", [2, 4])
def test_the_ends_hold_what_the_schedule_s_actions_leave_in_flight(schedule, chunks, p):
    m = 4 * p
    pipe = pipelined([1.0] * p, [2.0] * p, m, chunks, 0.0, schedule, sends_overlap=True)
    actions = listed(schedule, p, m, chunks)
    for rank, held in ((0, pipe.in_flight), (p - 1, pipe.in_flight_last)):
        assert held == pytest.approx(in_flight(actions, rank)[:, 0].sum(axis=-1).max() / chunks), rank


def simulated_1f1b(f, b, m):  # type: ignore[no-untyped-def]
    """Return the seconds of 1F1B with these stages. Each runs its next action as soon as its operands are there."""
    p = len(f)
    order = []
    for j in range(p):
        warm = min(p - j - 1, m)
        jobs = [("F", i) for i in range(warm)]
        for i in range(m - warm):
            jobs += [("F", warm + i), ("B", i)]
        order.append(jobs + [("B", i) for i in range(m - warm, m)])
    done, clock, at = {}, [0.0] * p, [0] * p
    while any(at[j] < len(order[j]) for j in range(p)):
        for j in range(p):
            while at[j] < len(order[j]):
                kind, i = order[j][at[j]]
                before = (kind, j - 1 if kind == "F" else j + 1, i)
                first = j == 0 if kind == "F" else j == p - 1
                if not first and before not in done:
                    break
                start = max(clock[j], 0.0 if first else done[before])
                clock[j] = done[kind, j, i] = start + (f if kind == "F" else b)[j]
                at[j] += 1
    return max(clock)


@given(st.integers(1, 200), st.integers(1, 32), st.integers(0, 2), st.integers(0, 2))
def test_every_block_is_in_one_stage_and_ends_count_as_blocks(blocks, stages, first, last):
    ends = first, last
    if blocks < 4 * stages:
        return
    layers = stage_layers(blocks, stages, ends)
    assert sum(layers) == blocks and len(layers) == stages
    full = [layers[0] + first, *layers[1:-1], layers[-1] + last] if stages > 1 else layers
    assert max(full) - min(full) <= 1 + (not any(ends))


@settings(max_examples=60)
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 12))
def test_unequal_stages_are_bounded_from_below(stages, m):
    f, b = (list(x) for x in zip(*stages, strict=True))
    pipe = pipelined(f, b, m, 1, 0.0, "1f1b", sends_overlap=True)
    truth = simulated_1f1b(f, b, m)
    assert pipe.step_s <= truth * (1 + 1e-9)
    assert pipe.step_s >= 0.75 * truth
    assert pipe.step_s >= m * max(x + y for x, y in stages) * (1 - 1e-9)


@given(seconds, seconds, st.floats(0, 10), st.floats(0, 0.5))
def test_beside_is_never_less_than_either_nor_more_than_both(compute, sent, moved, slow):
    units = [Unit(compute_s=compute, sent_s=sent), Unit(compute_s=0.0, gather_s=moved)]
    t, _ = passes(units, slow, prefetches=True, sums_overlap=True)
    assert t >= max(compute + sent, moved) - 1e-12
    assert t <= compute + sent + moved + 1e-12


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=8))
def test_overlap_never_makes_a_pass_longer_and_sums_that_queue_less_so(units):
    row = [Unit(compute_s=c, gather_s=g, sum_s=s) for c, g, s in units]
    apart, exposed = passes(row, 0.0, prefetches=False, sums_overlap=False)
    together, less = passes(row, 0.0, prefetches=True, sums_overlap=True)
    assert apart == pytest.approx(sum(map(sum, units))) and exposed == pytest.approx(
        sum(g + s for _, g, s in units)
    )
    assert together <= apart + 1e-9 and less <= exposed + 1e-9
    queued, _ = passes(row, 0.0, prefetches=True, sums_overlap=True, sums_queue=True)
    least = max(sum(c for c, _, _ in units), sum(g + s for _, g, s in units))
    assert least - 1e-9 <= queued <= together + 1e-9


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_block_is_in_a_stage(blocks, stages):
    layers = stage_layers(max(blocks, stages), stages)
    assert sum(layers) == max(blocks, stages) and len(layers) == stages and max(layers) - min(layers) <= 1
