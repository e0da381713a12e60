"""Collectives that are inserted into a graph: they run after their task, before its successors, and are launched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.replay.graph import EDGES, DataflowGraph, build_graph
from pase.replay.simulation.insert import Inserted, insert_after
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE


def chain() -> DataflowGraph:
    """A thread that launches two ops of 100 ns on one stream. Each launch is 3 ns of work and a call of 2 ns."""
    tasks = [
        {"device": (0, "thread"), "duration_ns": n, "name": w} for n, w in ((3, "work"), (2, "call")) * 2
    ]
    tasks += [{"device": (0, "stream 7"), "duration_ns": 100, "name": n} for n in ("first", "second")]
    g = build_graph(tasks, [(0, 1), (1, 2), (2, 3), (0, 4), (2, 5), (4, 5)])
    kinds = ["program", "program", "program", "launch", "launch", "stream"]
    return replace(g, edge_kind=np.array([EDGES.index(k) for k in kinds], np.uint8))


def sent(ns: float, name: str) -> Inserted:
    return Inserted(name=name, duration_ns=ns, nbytes=64, operation=1, ways=2)


def test_successors_wait_for_what_is_inserted_in_its_order() -> None:
    g = insert_after(chain(), {4: [sent(10, "sum"), sent(20, "gather")]})
    r = replay_graph(g)
    at = {g.task_name(i): float(r.start_ns[i]) for i in range(len(g))}
    assert (
        at["sum"] == at["first"] + 100
        and at["gather"] == at["sum"] + 10
        and at["second"] == at["gather"] + 20
    )
    assert r.makespan_ns == replay_graph(chain()).makespan_ns + 30
    assert g.kind[-2:].tolist() == [COLLECTIVE] * 2 and g.ways[-2:].tolist() == [2, 2] and g.nbytes[-1] == 64
    assert len(set(g.key)) == len(g)


def test_the_thread_launches_them_with_the_op() -> None:
    g = insert_after(chain(), {4: [sent(10, "sum"), sent(20, "gather")]})
    assert g.duration_ns[:4].tolist() == [3, 2 + 2 * (3 + 2), 3, 2]


@pytest.mark.parametrize("new", [{}, {5: [sent(7, "last")]}])
def test_nothing_is_inserted_or_at_the_end(new: dict[int, list[Inserted]]) -> None:
    more = sum(x.duration_ns for many in new.values() for x in many)
    assert replay_graph(insert_after(chain(), new)).makespan_ns == replay_graph(chain()).makespan_ns + more
