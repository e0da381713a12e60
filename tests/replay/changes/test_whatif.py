"""The parts of a collective's time that scale with the link, on constructed graphs with known answers."""

import numpy as np
import pytest

from pase.replay.changes.whatif import apply, split_cost
from pase.replay.graph import build_graph
from pase.replay.simulation.steady import evaluate
from pase.replay.types import COLLECTIVE, OPERATIONS

WIRE = 25e6  # bytes/s, which is 25 bytes per µs
MS = 1e6


def task(ms, mb, lane="stream 0", operation="all_reduce", **more):
    return {
        "device": (0, lane),
        "duration_ns": ms * MS,
        "kind": COLLECTIVE,
        "nbytes": round(mb * 1e6),
        "operation": OPERATIONS.index(operation),
        "ways": 2,
        "name": operation,
        **more,
    }


def test_a_known_wire_tells_bytes_from_startups_even_of_one_collective():
    # Over two ranks, an all-reduce sends each byte once and an all-gather half of them: 40 ms and 20 ms per MB at 25
    # MB/s.
    g = build_graph([task(55, 1.0), task(24, 1.0, operation="all_gather")], [(0, 1)])
    assert split_cost(g, WIRE).link_ns / MS == pytest.approx([40.0, 20.0])
    faster = apply(g, [("bandwidth", "", 2.0)], WIRE)
    assert max(evaluate(faster).values()) / MS == pytest.approx(55 - 20 + 24 - 10)
    assert faster.duration_ns / MS == pytest.approx([35.0, 14.0])


def test_collectives_at_once_share_the_wire():
    """A small message that overlaps with a large one takes as long, and none of its time is latency."""
    g = build_graph([task(44, 1.0), task(44, 0.1, lane="stream 1")], [])
    assert split_cost(g, WIRE).link_ns / MS == pytest.approx([44.0, 44.0])
    assert split_cost(g, WIRE).fixed_ns == pytest.approx([0.0, 0.0], abs=1e-6)
    # Without overlap, the time of the small one is not due to its bytes.
    apart = build_graph([task(44, 1.0), task(44, 0.1)], [(0, 1)])
    assert split_cost(apart, WIRE).link_ns / MS == pytest.approx([40.0, 4.0])


def test_what_a_link_loses_of_its_rate_grows_with_the_bytes_and_is_no_latency():
    """Different sizes give 40 ms per MB at the link's rate, a quarter more for copies, and 2 ms of startup."""
    g = build_graph([task(50 * x + 2, x) for x in (0.25, 0.5, 1.0, 2.0)], [(0, 1), (1, 2), (2, 3)])
    parts = split_cost(g, WIRE)
    assert parts.fixed_ns / MS == pytest.approx([2.0] * 4)
    assert parts.link_ns / MS == pytest.approx([10.0, 20.0, 40.0, 80.0])
    faster, later, more = (
        apply(g, [k], WIRE) for k in (("bandwidth", "", 2), ("latency", "", 3), ("ranks", "", 4))
    )
    assert faster.duration_ns / MS == pytest.approx([50 * x + 2 - 20 * x for x in (0.25, 0.5, 1.0, 2.0)])
    assert later.duration_ns / MS == pytest.approx([50 * x + 6 for x in (0.25, 0.5, 1.0, 2.0)])
    # Each of four ranks sends three quarters of a buffer twice instead of half of it, in three times as many steps.
    assert more.duration_ns / MS == pytest.approx([1.5 * 50 * x + 6 for x in (0.25, 0.5, 1.0, 2.0)])


def test_nothing_is_known_of_a_collective_without_a_size():
    g = build_graph([task(44, 1.0), {**task(9, 0.0), "nbytes": -1}], [(0, 1)])
    assert split_cost(g, WIRE).link_ns / MS == pytest.approx([40.0, 9.0 - 0.02])
    assert split_cost(g, WIRE).fixed_ns[1] == split_cost(g).fixed_ns[1] == pytest.approx(20_000.0)


def test_the_fixed_part_is_no_more_than_the_shortest_takes():
    """If durations are noisy and sizes hardly differ, the line through them may have a high intercept or decrease."""
    random = np.random.default_rng(0)
    for _ in range(50):
        ms = random.uniform(10, 60, size=5)
        g = build_graph([task(t, 1.0 + 0.1 * i) for i, t in enumerate(ms)], [])
        assert split_cost(g).fixed_ns.max() <= ms.min() * MS * (1 + 1e-9)


@pytest.mark.parametrize("startup_ms", [0.3, 2.0])
def test_without_a_wire_a_line_finds_the_startup(startup_ms):
    sizes = [0.1, 0.2, 0.5, 1.0, 3.0]
    g = build_graph([task(startup_ms + 40 * x, x) for x in sizes], [])
    assert split_cost(g).fixed_ns / MS == pytest.approx([startup_ms] * 5)


def ring_ms(ranks, mb, *, startup_ms, add_ms, lost=0.25):
    """The time of a ring all-reduce, message by message: a rank sends a chunk on when it has it and the link is free.

    startup_ms: the startup of a message. add_ms: the time to reduce 1 MB. lost: the time to copy a byte, relative to
    its time on the link.
    """
    part = mb / ranks
    message_ms = startup_ms + part * 1e6 / WIRE * 1e3 * (1 + lost)
    has, free = [[0.0] * ranks for _ in range(ranks)], [0.0] * ranks
    for step in range(2 * (ranks - 1)):
        arrived = []
        for r in range(ranks):
            which = (r - step) % ranks
            free[r] = max(free[r], has[r][which]) + message_ms
            arrived.append(((r + 1) % ranks, which, free[r] + (part * add_ms if step < ranks - 1 else 0.0)))
        for r, which, at in arrived:
            has[r][which] = at
    return max(map(max, has))


@pytest.mark.parametrize(("now", "then"), [(2, 4), (2, 8), (4, 8), (4, 2)])
@pytest.mark.parametrize("wire", [WIRE, None])
@pytest.mark.parametrize("habits", [{"startup_ms": 3, "add_ms": 0}, {"startup_ms": 0.5, "add_ms": 20}])
def test_more_ranks_take_what_a_ring_of_them_takes(now, then, wire, habits):
    """Startups are paid in each step of a ring. Copies, reductions and lost bandwidth are proportional to the bytes."""
    sizes = [0.25, 0.5, 1.0, 2.0]
    traced = [task(ring_ms(now, x, **habits), x, ways=now) for x in sizes]
    made = apply(build_graph(traced, [(0, 1), (1, 2), (2, 3)]), [("ranks", "", then)], wire)
    assert made.duration_ns / MS == pytest.approx([ring_ms(then, x, **habits) for x in sizes], rel=0.01)
