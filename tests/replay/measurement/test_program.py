"""The tasks and edges of one iteration: every dependency is found."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.graph import EDGES
from tests.replay.runs import COMM_BOUND, GPU_BOUND, HOST_BOUND, measured


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
def test_every_dependency_is_found(tmp_path: Path, shape: dict) -> None:
    run = simulate(ImaginedRun(ranks=2, **shape))
    m = measured(tmp_path, run)
    for (rank, iteration), p in m.programs.items():
        buckets = [i for i, n in enumerate(p.name) if "AllReduce" in n]
        label = {i: p.name[i] for i in range(len(p.name))} | {b: f"bucket_{k}" for k, b in enumerate(buckets)}
        kinds: dict[str, set] = {k: set() for k in EDGES}
        for (a, b), k in p.edges.items():
            kinds[EDGES[k]].add((label[a], label[b]))
        assert run.true_waits <= kinds["wait"], (rank, iteration, run.true_waits - kinds["wait"])
        ops = [i for i, d in enumerate(p.device) if d[1] == "stream"]
        launched = {b for (_, b), k in p.edges.items() if EDGES[k] == "launch"}
        assert set(ops) <= launched
        # The main thread starts the autograd thread, awaits it, and awaits the device at the end.
        assert len(kinds["handoff"]) == 2
        assert ("adam_2", "cudaStreamSynchronize") in kinds["sync"]
        order = [p.name[i] for i in ops if p.device[i][0] == "7"]
        chain = {(p.name[a], p.name[b]) for (a, b), k in p.edges.items() if EDGES[k] == "stream"}
        assert set(itertools.pairwise(order)) <= chain
