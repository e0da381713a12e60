"""PyTorch programs traced by pase profile: two processes that all-reduce gradients over gloo, aligned and replayed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.replay import align, estimate, load, measure
from pase.replay.graph import EDGES
from pase.replay.measurement.matching import match_collectives
from pase.replay.simulation.contention import slowdowns
from pase.replay.traces.gloo import WAIT
from pase.replay.types import COLLECTIVE
from tests.command import printed, reported

TRAIN = """
import os, sys
import jax  # as other libraries do: whoever trains is traced
import torch, torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
x = torch.randn(32, 128)
for _ in range(9):
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
BOTH = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2], str(r)]) for r in (0, 1)]
sys.exit(max(p.wait() for p in ranks))
"""
ALONE = """
import sys, torch, pase
w = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
def step():
    optimizer.zero_grad(); w(torch.ones(4, 16)).sum().backward(); optimizer.step()
with pase.profile(sys.argv[1]) as run:
    for _ in range(3):
        if sys.argv[2] == "marked":
            with run.step(): step()
        else:
            step()
    torch.ones(8).sum()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    (folder / "train.py").write_text(TRAIN)
    (folder / "both.py").write_text(BOTH)
    program = (sys.executable, folder / "both.py", folder / "train.py", folder / "meet")
    said = printed("profile", "--json", "--steps", 6, "-o", folder / "traces", "--", *program)
    assert len(json.loads(said)["traces"]) == 2
    return folder / "traces"


@pytest.mark.torch
def test_each_rank_writes_its_steps(traces: Path) -> None:
    for rank in (0, 1):
        about = json.loads((traces / f"rank{rank}" / "manifest.json").read_text())
        assert (about["rank"], about["processes"]) == (rank, 2) and about["torch"]
    t = load(traces)
    assert t.ranks == (0, 1)
    # There are six complete steps, and nothing after the last one.
    assert sorted((m.rank, m.iteration) for m in t.marks) == [(r, i) for r in (0, 1) for i in range(6)]
    sends = np.flatnonzero(t["kind"] == COLLECTIVE)
    sizes = {int(b) for b in t["nbytes"][sends]}
    layer = 4 * (128 * 128 + 128)
    per_step = len(sends) / 12
    assert per_step == int(per_step) > 1
    total = sum(t["nbytes"][sends].tolist()) / 12
    assert total == 4 * layer and all(b % layer == 0 for b in sizes)


@pytest.mark.torch
def test_a_run_over_gloo_is_aligned_and_replayed(traces: Path) -> None:
    t = align(load(traces))
    # Both processes read one machine's clock. The offset found is the difference of gloo's ends, larger on a busy host.
    ends = [t.end_ns[list(m.members.values())] for m in match_collectives(t)[0] if len(m.members) == 2]
    apart = float(np.median([abs(int(a) - int(b)) for a, b in ends]))
    assert max(abs(c.offset_ns) for c in t.clocks) < max(5e6, 1.01 * apart)
    m = measure(t)
    g = estimate(m, m.steady())
    sends = g.kind == COLLECTIVE
    assert set(g.gang[sends].tolist()) == set(range(g.gangs)) and g.gangs == sends.sum() / 2
    launched = g.dst[g.edge_kind == EDGES.index("launch")]
    assert set(np.flatnonzero(sends).tolist()) <= set(launched.tolist())
    report = reported("replay", traces, "--what-if", "bandwidth=2", "--force")
    assert [r["rank"] for r in report["ranks"]] == [0, 1] and report["held_out"]
    assert report["what_if"][0]["speedup"] >= 1
    assert "launch-bound" not in [f["kind"] for f in reported("diagnose", traces)["findings"]]


def _gloo_trace(rank: int, late_us: float, recorded: bool = False) -> dict[str, Any]:
    """Three steps with two all-reduces each. The thread waits for both, and then works for 300 µs.

    recorded: whether the trace has the wait as an op, as with functional collectives.
    """
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    sizes = {"Input Dims": [[1000]], "Input type": ["float"]}
    for k in range(3):
        z = 3300.0 * (k + 1)
        own = late_us * rank
        span("user_annotation", f"ProfilerStep#{k}", 1, z, 3300)
        span("cpu_op", "aten::mm", 1, z, 500 + own)
        span("cpu_op", "c10d::allreduce_", 1, z + 500 + own, 20)
        span("cpu_op", "aten::mm", 1, z + 520 + own, 480)
        span("cpu_op", "c10d::allreduce_", 1, z + 1000 + own, 20)
        # The assignment to workers is random, and a worker may record its end after it has woken the thread.
        a, b = (8, 9) if k % 2 else (9, 8)
        span("user_annotation", "gloo:all_reduce", a, z + 550 + own, 1450 - own, **sizes)
        span("user_annotation", "gloo:all_reduce", b, z + 1050 + own, 1960 - own, **sizes)
        if recorded:
            span("cpu_op", "_c10d_functional::wait_tensor", 1, z + 1020 + own, 1980 - own)
        span("cpu_op", "copy", 1, z + 3000, 300)
    info = {"rank": rank, "world_size": 2}
    return {"distributedInfo": info, "traceEvents": events}


@pytest.mark.parametrize("recorded", [False, True])
def test_launches_and_waits_are_found_among_gloos_events(tmp_path: Path, recorded: bool) -> None:
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "wt") as f:
            json.dump(_gloo_trace(rank, 100.0, recorded), f)
    t = align(load(tmp_path), "none")
    waits = np.array([n == WAIT for n in t.names])[t["name"]]
    assert waits.sum() == 6 and (t["duration_ns"][waits] > 1_800_000).all()
    sends = t["kind"] == COLLECTIVE
    assert {t.lanes[int(x)].name for x in t["lane"][sends]} == {"gloo 0", "gloo 1"}
    assert set(t["nbytes"][sends].tolist()) == {4000}
    m = measure(t)
    g = estimate(m, m.steady())
    into = g.edge_kind == EDGES.index("sync")
    # On each rank, the wait depends on both all-reduces.
    assert into.sum() == 4 and (g.kind[g.src[into]] == COLLECTIVE).all()
    report = reported("replay", tmp_path, "--align", "none", "--what-if", "bandwidth=1000")
    for r in report["ranks"]:
        assert abs(r["error"]) < 0.02
        assert r["compute_s"] == pytest.approx(1.3e-3 + 1e-4 * r["rank"], rel=0.05)
    # With fast all-reduces, only the thread's own work is left of the step.
    assert report["what_if"][0]["iteration_s"] < 1.7e-3
    found = reported("diagnose", tmp_path, "--align", "none")["findings"]
    (held,) = [f for f in found if f["kind"] == "blocking-calls"]
    assert "Gloo works meanwhile. The thread waits for its collectives" in held["detail"]


def _contended_trace(rank: int, slower: float) -> dict[str, Any]:
    """Steps with three matrix products alone, and three of the same size that overlap with an all-reduce.

    slower: how many times as long the latter take.
    """
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    shape = {"Input Dims": [[64, 64], [64, 64]]}
    sizes = {"Input Dims": [[1000]], "Input type": ["float"]}
    step = 1620.0 + 1500.0 * slower + 400.0
    for k in range(3):
        z = 1000.0 + step * k
        span("user_annotation", f"ProfilerStep#{k}", 1, z, step)
        for i in range(3):
            span("cpu_op", "aten::mm", 1, z + 500 * i, 499.9, **shape)
        span("cpu_op", "c10d::allreduce_", 1, z + 1500, 20)
        span("user_annotation", "gloo:all_reduce", 9, z + 1520, 1500.0 * slower + 50.0, **sizes)
        for i in range(3):
            span("cpu_op", "aten::mm", 1, z + 1520 + 500 * slower * i, 500 * slower - 0.1, **shape)
        # The thread waits for the end of the all-reduce, and then updates.
        span("cpu_op", "aten::add_", 1, z + 1620 + 1500 * slower, 400.0)
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_hidden_sums_slow_what_they_hide_behind(tmp_path: Path, slower: float) -> None:
    """Twice the bandwidth halves the time in which products overlap with an all-reduce, which makes them faster."""
    for rank in (0, 1):
        with gzip.open(tmp_path / f"rank{rank}.json.gz", "wt") as f:
            json.dump(_contended_trace(rank, slower), f)
    found = slowdowns(align(load(tmp_path), "none"))
    assert found == pytest.approx({0: slower, 1: slower}, rel=1e-3)
    report = reported("replay", tmp_path, "--align", "none", "--what-if", "bandwidth=2", "--force")
    beside = 1500 * slower
    # While the shorter all-reduce runs, work proceeds at 1/slower, and then at full speed.
    sped_up = beside / 2 + (1500 - beside / 2 / slower)
    waited = 100.0  # after the last product, for the end of the all-reduce
    saved = report["replayed_s"] - report["what_if"][0]["iteration_s"]
    assert saved == pytest.approx((beside - sped_up + waited) * 1e-6, abs=60e-6)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["marked", "by the optimizer"])
def test_two_lines_in_code(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "t"), how], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    t = load(tmp_path / "t")
    # Between three steps of the optimizer there are two complete iterations. After the last step there is none.
    assert [m.iteration for m in t.marks] == ([0, 1, 2] if how == "marked" else [0, 1])
