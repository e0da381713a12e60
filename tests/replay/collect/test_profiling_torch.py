"""PyTorch programs traced by pase profile: two processes that all-reduce gradients over gloo, aligned and replayed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pase.replay import align, estimate, load, measure
from pase.replay.graph import EDGES
from pase.replay.measurement.matching import match_collectives
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


OWN = """
import torch
w = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for i in range(9):
    w(torch.ones(4, 16)).sum().backward(); optimizer.step()
with torch.profiler.profile():
    pass
"""


@pytest.mark.torch
def test_a_program_with_its_own_profiler_is_told_that_there_is_one(tmp_path: Path) -> None:
    """And that the trace of one process on a CPU has nothing to replay."""
    (tmp_path / "own.py").write_text(OWN)
    words = [
        "profile",
        "-o",
        str(tmp_path / "traces"),
        "--skip",
        "2",
        "--",
        sys.executable,
        str(tmp_path / "own.py"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pase.cli", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "without the program's own profiler" in done.stderr
    assert "in one process, so its trace has no device op" in done.stderr
