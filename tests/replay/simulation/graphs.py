"""Random data-flow graphs."""

from __future__ import annotations

from hypothesis import strategies as st

from pase.replay.graph import DataflowGraph, build_graph


@st.composite
def graphs(draw: st.DrawFn, gangs: bool = True, chained: bool = False) -> DataflowGraph:
    """Random DAGs with integer times. chained: each device's tasks have a fixed order, as in a trace."""
    ranks = draw(st.integers(1, 3))
    n = draw(st.integers(1, 12))
    tasks, edges = [], []
    for _ in range(n):
        collective = gangs and ranks > 1 and draw(st.booleans())
        members = range(ranks) if collective else [draw(st.integers(0, ranks - 1))]
        gang = max((t["gang"] for t in tasks), default=-1) + 1 if collective else -1
        stream = "stream c" if collective else f"stream {draw(st.integers(0, 1))}"
        first = len(tasks)
        for r in members:
            times = {"duration_ns": draw(st.integers(0, 9)), "release_ns": draw(st.integers(0, 3))}
            tasks.append(
                {
                    "device": (r, stream),
                    "gang": gang,
                    "priority": 0 if gangs else draw(st.integers(0, 2)),
                    **times,
                }
            )
        for k, r in enumerate(members):
            for earlier in range(first):
                same = tasks[earlier]["device"] == (r, stream)
                # Collectives run in the same order on all ranks, as NCCL requires.
                if same and (collective or chained):
                    edges.append((earlier, first + k, 0))
                elif draw(st.integers(0, 5)) == 0:
                    edges.append((earlier, first + k, draw(st.integers(0, 3))))
    return build_graph(tasks, edges)
