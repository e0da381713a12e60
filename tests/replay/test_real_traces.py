"""The shared traces of real runs: alignment, held-out predictions of iterations and ranks, diagnosis, optimization."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pase.replay.changes.optimize import optimize_graph
from pase.replay.measurement.clocks import align, collective_costs
from pase.replay.measurement.matching import match_collectives
from pase.replay.measurement.model import Measured, estimate, measure
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.simulation.predict import held_out, held_out_ranks
from pase.replay.traces.ingest import load
from pase.replay.types import OPERATIONS, Timeline
from tests.needs import SHARED

TRACES = SHARED / "traces"
pytestmark = pytest.mark.data("traces")

FSDP = "jaxtoolbox_pax_fsdp4"
DDP = "hta/nccl_parser_config_nccl_data.json.gz"
UNFUSED = "hta/df_index_resolver_df_index_resolver.json.gz"
DLRM = "hta/trace_diff_control_control.json.gz"


@cache
def _timeline(name: str) -> Timeline:
    return align(load(TRACES / name))


@cache
def _measured(name: str) -> Measured:
    return measure(_timeline(name))


def test_clocks_of_four_processes_agree_within_microseconds() -> None:
    t = _timeline(FSDP)
    at = {m.rank: m.start_ns for m in t.marks if m.iteration == 3}
    offsets = [float(t.clock(r).to_global(np.array([at[r]]))[0] - at[r]) / 1e6 for r in t.ranks]
    assert offsets == pytest.approx([0.0, 28.54, 174.41, -305.48], abs=0.01)
    assert all(t.clock(r).uncertainty_ns < 1000 for r in t.ranks)
    matches, problems = match_collectives(t)
    assert not problems
    steady = [m for m in matches if m.iteration >= 2]
    assert len(steady) == 3 * 23
    spread = [c["end_spread_ns"] for c in collective_costs(t, steady)]
    assert np.median(spread) < 7_000


@pytest.mark.release
@pytest.mark.parametrize("seed", range(3))
def test_injected_skew_and_drift_come_back_out(seed: int) -> None:
    t = load(TRACES / FSDP)
    rng = np.random.default_rng(seed)
    columns = {k: v.copy() for k, v in t.columns.items()}
    skew, drift = rng.uniform(-5e6, 5e6, 4), rng.uniform(-50e-6, 50e-6, 4) * (seed > 0)
    rank, zero = t.rank_of, {r: int(t["start_ns"][t.rank_of == r].min()) for r in t.ranks}
    for r in t.ranks:
        mine = rank == r
        begin, end = t["start_ns"][mine], t.end_ns[mine]
        columns["start_ns"][mine] = (
            begin + np.int64(skew[r]) + ((begin - zero[r]) * drift[r]).astype(np.int64)
        )
        columns["duration_ns"][mine] = (
            end
            + np.int64(skew[r])
            + ((end - zero[r]) * drift[r]).astype(np.int64)
            - columns["start_ns"][mine]
        )
    changed = align(replace(t, columns=columns))
    # Compare the ends of steady collectives on the common clock, relative to rank 0.
    before = _ends(_timeline(FSDP))
    after = _ends(changed)
    moved = (after - after[:, :1]) - (before - before[:, :1])
    assert np.abs(np.median(moved, axis=0)).max() < 5_000
    for r in t.ranks[1:]:
        got = (1 + changed.clock(r).drift) * (1 + drift[r]) / (1 + drift[0])
        assert abs(got - 1 - _timeline(FSDP).clock(r).drift) < 1e-6


def _ends(t: Timeline) -> np.ndarray:
    matches = [m for m in match_collectives(t)[0] if m.iteration >= 2]
    end = t.to_global(t.end_ns)
    return np.array([[end[m.members[r]] for r in t.ranks] for m in matches])


def test_fsdp_iterations_are_predicted_from_the_others_within_one_percent() -> None:
    m = _measured(FSDP)
    assert m.steady() == [2, 3, 4]
    errors = [p.error for p in held_out(m)]
    assert len(errors) == 12
    assert max(map(abs, errors)) < 0.01


def test_fsdp_ranks_are_predicted_from_other_ranks_within_one_percent() -> None:
    m = _measured(FSDP)
    predictions = held_out_ranks(m, estimate(m, m.steady()), m.steady())
    assert [p.rank for p in predictions] == [0, 1, 2, 3]
    assert max(abs(p.error) for p in predictions) < 0.01


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [DDP, UNFUSED, DLRM])
def test_host_bound_runs_are_predicted_within_one_percent_of_their_mean(name: str) -> None:
    """Single iterations of these runs differ by 2–5%, but the mean prediction agrees with the mean iteration."""
    m = _measured(name)
    predictions = held_out(m)
    replayed = np.mean([p.replayed_ns for p in predictions])
    measured = np.mean([p.measured_ns for p in predictions])
    assert abs(replayed / measured - 1) < 0.01
    # The error of a prediction exceeds the iteration's distance from the mean by at most 1%.
    for p in predictions:
        unusual = abs(p.naive_error)
        assert abs(p.error) < unusual + 0.01


def test_a_device_only_replay_would_miss_the_launching_thread() -> None:
    m = _measured(DDP)
    findings = {f.kind: f for f in diagnose_run(m).findings}
    f = findings["launch-bound"]
    # At most the time that the device waits for launches, not what else ends with it.
    assert f.measured_ns >= f.cost_ns > 0.7 * np.median([m.measured_ns[k] for k in m.programs])
    assert f.evidence


def test_exposed_communication_is_found_and_costed() -> None:
    d = diagnose_run(_measured(FSDP))
    f = next(f for f in d.findings if f.kind == "exposed-communication")
    assert 0.01 * d.iteration_ns < f.cost_ns < 0.05 * d.iteration_ns
    assert "reduce-scatter.131" in f.detail


def test_unfused_all_reduces_are_fused() -> None:
    m = _measured(UNFUSED)
    o = optimize_graph(estimate(m, m.steady()), passes=["tensor-fusion"])
    assert o.after_ns < 0.98 * o.before_ns
    assert max(len(b) for b in o.plan.buckets(len(o.coarse.tensors)).values()) > 100
    assert o.seconds < 30


def test_sampled_traces_are_read_and_paired() -> None:
    files = sorted((TRACES / "hta").glob("trace_filter_sampled_rank-*"))
    t = align(load(files))
    assert t.ranks == (0, 1)
    assert any("126 of 128 ranks have no trace" in str(p) for p in t.problems)
    matches, problems = match_collectives(t)
    # Only the gather of each step is the same on both: their other collectives are of other sizes.
    assert {OPERATIONS[int(t["operation"][e])] for m in matches for e in m.members.values()} == {"all_gather"}
    assert "left unmatched" in problems[0].what
    assert measure(t).measured_ns


def test_xplane_of_eight_devices() -> None:
    t = load(TRACES / "tracelens")
    assert len(t.ranks) == 8
    assert "cudnn-conv.1" in t.dataflow
