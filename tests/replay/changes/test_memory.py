"""Ways to use less memory, and a limit that none of them meets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.errors import Infeasible, PaseError
from pase.replay.changes.memory import MemoryUse, memory_options
from pase.replay.changes.optimize import optimize_graph
from pase.replay.graph import EDGES, build_graph
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.traces.ingest import load
from pase.replay.types import KINDS


def test_memory_passes_meet_the_limit_or_say_so(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=2, kernel_us=100.0, between_us=4.0))
    m = measure(align(load(write(run, tmp_path / "x"))))
    g = estimate(m, m.steady())
    use = MemoryUse(rank=0, peak_bytes=16 << 30, start_bytes=4 << 30, kept=0.4)
    free = optimize_graph(g, memory=use, budget_s=1)
    assert free.memory is not None and free.memory.name == "as it is"
    tight = optimize_graph(g, memory=use, memory_limit_bytes=12 << 30, budget_s=1)
    assert tight.memory is not None and tight.memory.peak_bytes <= 12 << 30
    fitting = [o for o in tight.memory_options if o.peak_bytes <= 12 << 30]
    assert tight.memory.iteration_ns == min(o.iteration_ns for o in fitting)
    # Every option that saves memory takes more time than the unchanged run.
    assert all(o.iteration_ns >= tight.memory_options[0].iteration_ns * 0.999 for o in tight.memory_options)
    with pytest.raises(Infeasible, match=r"4\.00 GiB") as e:
        optimize_graph(g, memory=use, memory_limit_bytes=4 << 30)
    assert e.value.where == "--memory-limit"
    with pytest.raises(PaseError, match="no memory events") as e:
        optimize_graph(g, memory_limit_bytes=4 << 30)
    assert "profile_memory=True" in e.value.fix


def test_micro_batches_send_and_update_once() -> None:
    """Each half launches all compute again. What is sent, and the update, is launched and run once."""
    us = 1000.0
    tasks: list[dict[str, object]] = []
    edges: list[tuple[int, int]] = []
    kinds: list[str] = []
    ops = (("matmul", "gemm", "kernel"), ("reduce", "all-reduce.1", "collective"), ("step", "adam", "kernel"))
    for k, (called, name, kind) in enumerate(ops):
        host = {
            "device": (0, "thread 1"),
            "kind": KINDS.index("host"),
            "name": called,
            "duration_ns": 100 * us,
        }
        call = {**host, "kind": KINDS.index("runtime"), "duration_ns": 0.0}
        op = {"device": (0, f"stream {k}"), "kind": KINDS.index(kind), "name": name, "duration_ns": 10 * us}
        tasks += [host, call, op]
        work = 3 * k
        edges += [(work, work + 1), (work, work + 2), *([(work - 2, work)] if k else [])]
        kinds += ["program", "launch", *(["program"] if k else [])]
    kind = np.array([EDGES.index(x) for x in kinds], dtype=np.uint8)
    g = replace(build_graph(tasks, edges), edge_kind=kind, root={0: 0})
    options = {o.name: o for o in memory_options(g, MemoryUse(rank=0, peak_bytes=8, start_bytes=0, kept=1.0))}
    whole, halves = options["as it is"].iteration_ns, options["accumulation over 2"].iteration_ns
    # The first half: the host's work for the matmul, which takes longer than the device's.
    assert halves - whole == pytest.approx(100 * us, rel=0.06)
    assert "recomputation" not in options  # nothing is kept that it could drop
