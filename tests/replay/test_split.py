"""What of a collective's time scales with the link, against made graphs whose answer is known."""

import numpy as np
import pytest

from pase.replay.graph import build_graph
from pase.replay.steady import evaluate
from pase.replay.types import COLLECTIVE, OPERATIONS
from pase.replay.whatif import apply, split_cost

WIRE = 25e6  # bytes/s: 25 bytes a µs
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
    # Over two ranks an all-reduce sends each byte once, a gather half of them: 40 ms and 20 ms of a MB at 25 MB/s.
    g = build_graph([task(55, 1.0), task(24, 1.0, operation="all_gather")], [(0, 1)])
    assert split_cost(g, WIRE) / MS == pytest.approx([15.0, 4.0])
    faster = apply(g, [("bandwidth", "", 2.0)], WIRE)
    assert max(evaluate(faster).values()) / MS == pytest.approx(55 - 20 + 24 - 10)
    assert faster.duration_ns / MS == pytest.approx([35.0, 14.0])


def test_collectives_at_once_share_the_wire():
    """A small message beside a large one lasts as long, and none of that is latency."""
    g = build_graph([task(44, 1.0), task(44, 0.1, lane="stream 1")], [])
    assert split_cost(g, WIRE) / MS == pytest.approx([0.0, 0.0], abs=1e-6)
    # Apart, the small one's time is its startup.
    apart = build_graph([task(44, 1.0), task(44, 0.1)], [(0, 1)])
    assert split_cost(apart, WIRE) / MS == pytest.approx([4.0, 40.0])


def test_nothing_is_known_of_a_collective_without_a_size():
    g = build_graph([task(44, 1.0), {**task(9, 0.0), "nbytes": -1}], [(0, 1)])
    assert split_cost(g, WIRE)[0] / MS == pytest.approx(4.0)
    assert split_cost(g, WIRE)[1] == split_cost(g)[1] == pytest.approx(20_000.0)


def test_the_fixed_part_is_no_more_than_the_shortest_takes():
    """Durations that jump about on sizes that hardly differ: the line through them starts high, or falls."""
    random = np.random.default_rng(0)
    for _ in range(50):
        ms = random.uniform(10, 60, size=5)
        g = build_graph([task(t, 1.0 + 0.1 * i) for i, t in enumerate(ms)], [])
        assert split_cost(g).max() <= ms.min() * MS * (1 + 1e-9)


@pytest.mark.parametrize("startup_ms", [0.3, 2.0])
def test_without_a_wire_a_line_finds_the_startup(startup_ms):
    sizes = [0.1, 0.2, 0.5, 1.0, 3.0]
    g = build_graph([task(startup_ms + 40 * x, x) for x in sizes], [])
    assert split_cost(g) / MS == pytest.approx([startup_ms] * 5)
