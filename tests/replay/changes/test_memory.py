"""Ways to use less memory, and a limit that none of them meets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.errors import Infeasible, PaseError
from pase.replay.changes.memory import MemoryUse
from pase.replay.changes.optimize import optimize_graph
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.traces.ingest import load


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
