"""Profiles from traces: a simulated run whose dependencies are all known, and the shared traces of real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.bridges.trace_profile import fit_curve, is_trace, problem_from_timeline, problem_from_traces
from pase.errors import Infeasible, PaseError
from pase.replay import align, load
from pase.schedule import Options, evaluate, get_policy
from pase.schedule.load import parse_link
from tests.command import reported
from tests.needs import SHARED

KERNEL_US = 120.0


def imagined(**changed: Any) -> ImaginedRun:
    return simulate(
        ImaginedRun(
            **({"layers": 12, "bucket_layers": 3, "bucket_growth": 0.5, "kernel_us": KERNEL_US} | changed)
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(imagined(), tmp_path_factory.mktemp("traces") / "run")


def test_an_imagined_run_comes_back(folder: Path) -> None:
    run = imagined()
    p = problem_from_traces(folder)
    sizes = [round(run.bucket_bytes * (1 + 0.5 * k)) // 4 * 4 for k in range(4)]
    assert [t.nbytes for t in p.tensors] == sizes and p.is_plain
    assert {t.kind for t in p.tensors} == {"all_reduce"} and [x.name for x in p.links] == ["network"]
    # Without collectives, the step is as long as in the same run with an infinitely fast network.
    instant = imagined(bandwidth_bytes_per_us=1e12, collective_us=0.0)
    assert p.compute_s == pytest.approx(np.median(instant.iteration_us) * 1e-6, rel=0.03)
    # There are four buckets of three layers. Backward is two thirds of the compute; forward mirrors it.
    forward = sum(b.seconds for b in p.blocks if b.phase == "forward")
    assert forward / p.compute_s == pytest.approx(1 / 3, abs=0.08)
    ready = [sum(b.seconds for b in p.blocks[: (t.ready_after or 0) + 1]) for t in p.tensors]
    steps = np.diff(ready)
    assert steps == pytest.approx([3 * 2 * KERNEL_US * 1e-6] * 3, rel=0.05)
    need = [sum(b.seconds for b in p.blocks[: t.needed_before]) for t in p.tensors]
    assert need == sorted(need, reverse=True) and need[-1] == 0.0
    # The link has the startup and bandwidth that the run was simulated with.
    curve = p.links[0].curve_for(p.tensors[0].axes)
    for nbytes in (*sizes, sizes[-1] * 2):
        assert curve.seconds_for(nbytes) == pytest.approx(
            (run.collective_us + nbytes / run.bandwidth_bytes_per_us) * 1e-6, rel=0.02
        )
    assert curve.startup_s == pytest.approx(run.collective_us * 1e-6, rel=0.3)


def test_a_timeline_is_a_profile_too(folder: Path, tmp_path: Path) -> None:
    from pase.replay.traces.timeline_io import save_timeline

    t = align(load(folder))
    save_timeline(t, tmp_path / "t.json")
    assert is_trace(tmp_path / "t.json") and is_trace(folder)
    a, b = problem_from_timeline(t, name="x"), problem_from_traces(tmp_path / "t.json")
    assert a.tensors == b.tensors and [x.seconds for x in a.blocks] == [x.seconds for x in b.blocks]
    assert problem_from_timeline(t, rank=1).compute_s == pytest.approx(a.compute_s, rel=0.01)
    with pytest.raises(PaseError, match="rank 7") as e:
        problem_from_timeline(t, rank=7)
    assert "[0, 1]" in e.value.fix


def test_the_command_reads_traces(folder: Path) -> None:
    rows = {r["policy"]: r for r in reported("schedule", folder, "--policy", "all")["policies"]}
    assert {"ddp", "horovod", "bytescheduler", "tac", "ours"} <= set(rows)
    ours = rows["ours"]["iteration_s"]
    assert all(ours <= r["iteration_s"] * (1 + 1e-9) for r in rows.values() if "iteration_s" in r)


def test_sizes_that_a_trace_lacks_follow_from_a_link(folder: Path) -> None:
    t = align(load(folder))
    t.columns["nbytes"][:] = -1
    with pytest.raises(PaseError, match="no size") as e:
        problem_from_timeline(t)
    assert "record_shapes=True" in e.value.fix and "--link" in e.value.fix
    run = imagined()
    link = parse_link(f"net:{run.collective_us}us:{run.bandwidth_bytes_per_us / 1e3}GB/s")
    p = problem_from_timeline(t, links=(link,))
    sizes = [run.bucket_bytes * (1 + 0.5 * k) for k in range(4)]
    assert [t.nbytes for t in p.tensors] == pytest.approx(sizes, rel=0.02) and p.links == (link,)


def test_nothing_to_schedule_is_said(tmp_path: Path) -> None:
    from pase.replay.types import COLLECTIVE

    t = align(load(write(imagined(iterations=3), tmp_path / "r")))
    with pytest.raises(Infeasible, match="has no collective"):
        problem_from_timeline(t.select(t["kind"] != COLLECTIVE))


def test_a_fitted_curve() -> None:
    sizes = [2.0**k for k in range(10, 28, 3)]
    curve = fit_curve(sizes, [3e-5 + n * 2e-10 for n in sizes])
    assert curve.startup_s == pytest.approx(3e-5, rel=1e-6)
    assert curve.seconds_for(3e8) == pytest.approx(3e-5 + 0.06, rel=1e-6)
    alone = fit_curve([1e6, 1e6], [2e-3, 4e-3], shortest_s=1e-3)
    assert (alone.startup_s, alone.seconds_for(1e6), alone.seconds_for(2e6)) == pytest.approx(
        (1e-3, 3e-3, 5e-3)
    )


@pytest.mark.data("traces")
@pytest.mark.parametrize(
    ("name", "measured_ms", "tensors"),
    [
        pytest.param("jaxtoolbox_pax_fsdp4", 126.5, 23, marks=pytest.mark.release),
        ("hta/nccl_parser_config_nccl_data.json.gz", 222.0, 5),
    ],
)
def test_the_shared_traces(name: str, measured_ms: float, tensors: int) -> None:
    """For an FSDP step and a data-parallel step, the run's own order takes about the measured time."""
    p = problem_from_traces(SHARED / "traces" / name)
    assert len(p.tensors) == tensors
    e = evaluate(p, get_policy("fifo").make(p, Options()))
    assert e.iteration_s * 1e3 == pytest.approx(measured_ms, rel=0.03)
    assert p.compute_s <= e.iteration_s
