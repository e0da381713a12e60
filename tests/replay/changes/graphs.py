"""Graphs of backward passes that the tests of the optimizer share."""

from __future__ import annotations

from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.types import COLLECTIVE, OPERATIONS

ALPHA, BETA = 50_000.0, 1e-2


def backward(compute: list[int], nbytes: list[int]) -> DataflowGraph:
    """A sequence of backward ops, each with a gradient to all-reduce on one link, and an optimizer op after all."""
    tasks, edges = [], []
    previous = {"c": -1, "q": -1}
    for k, (c, b) in enumerate(zip(compute, nbytes, strict=True)):
        tasks.append({"device": (0, "stream 7"), "duration_ns": c, "name": f"gemm_{k}"})
        tasks.append(
            {
                "device": (0, "link"),
                "duration_ns": ALPHA + BETA * b,
                "nbytes": b,
                "kind": COLLECTIVE,
                "operation": OPERATIONS.index("all_reduce"),
                "name": f"all-reduce.{k}",
            }
        )
        for name, i in (("c", 2 * k), ("q", 2 * k + 1)):
            if previous[name] >= 0:
                edges.append((previous[name], i))
            previous[name] = i
        edges.append((2 * k, 2 * k + 1))
    tasks.append({"device": (0, "stream 7"), "duration_ns": 1000, "name": "adam"})
    edges.append((previous["q"], len(tasks) - 1))
    edges.append((previous["c"], len(tasks) - 1))
    return build_graph(tasks, edges)
