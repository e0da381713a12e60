"""Runs whose replay can or cannot be trusted: few iterations, slow launches, late ranks, unexplained delays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.errors import Infeasible
from pase.replay.changes.whatif import apply
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from pase.replay.types import Event, Mark, Timeline, from_events
from tests.command import printed, run
from tests.replay.runs import measured, numbered, running_ahead
from tests.replay.traces.compiled import facts_of_step, timeline_of_steps

SHARED = Path(__file__).parents[3] / ".." / "shared" / "data" / "traces"
TRACES = ["hta/nccl_parser_config_nccl_data.json.gz", "hta/df_index_resolver_df_index_resolver.json.gz"]
TRACES += ["hta/trace_diff_control_control.json.gz", "jaxtoolbox_pax_fsdp4"]


def test_a_slow_launch_behind_others_that_are_ahead_starves_no_device(tmp_path: Path) -> None:
    """The slow iteration is not replayed as if the CPU had launched all earlier ones as slowly."""
    path, truth = running_ahead(tmp_path, wobble=False, slow=2)
    run = Run(measured=measure(load(path)))
    assert truth == pytest.approx([truth[0]] * len(truth), rel=1e-3)
    assert run.error(worst=True) < 2e-3


@pytest.mark.some(1)
@pytest.mark.skipif(not SHARED.exists(), reason=f"no shared traces at {SHARED}")
@pytest.mark.parametrize("name", TRACES)
def test_few_iterations_do_not_explode(name: str) -> None:
    whole = load(SHARED / name)
    for count in (1, 3):
        run = Run(measured=measure(align(_cut(whole, count))))
        low, high = run.lengths_ns.min(), run.lengths_ns.max()
        assert 0.9 * low < run.replayed_ns < 1.1 * high or run.doubts
        worst = run.error(worst=True)
        assert worst is None or worst < 0.25 or run.doubts
        if len(run.iterations) == 1 and len(run.graph.ranks) == 1:
            assert (
                worst is None and "the error of each predicted gain is unknown" in run.headline
            ) or run.doubts


def _cut(t: Timeline, count: int) -> Timeline:
    """Returns the first ``count`` iterations, with everything that they launched."""
    numbers = sorted({m.iteration for m in t.marks})[:count]
    keep = np.isin(t["iteration"], numbers)
    return replace(t.select(keep), marks=tuple(m for m in t.marks if m.iteration in numbers))


def test_a_replay_is_as_long_as_the_iterations_are_on_average(tmp_path: Path) -> None:
    """Ranks are late in turn, so a replay of medians is too short. The replay of means predicts well."""
    late = simulate(
        ImaginedRun(ranks=4, iterations=16, noise=0.02, chance_us=1000.0, kernel_us=200.0, between_us=4.0)
    )
    run = Run(measured=measured(tmp_path, late))
    assert max(evaluate(run.medians).values()) < 0.95 * run.measured_ns and run.stretch > 1.05
    assert run.replayed_ns == pytest.approx(run.measured_ns, rel=0.01)
    assert run.error() <= 1.1 * run.error(naive=True) and not run.doubts
    assert sum(s.added_ns for s in run.replay.path()) == pytest.approx(run.replayed_ns, rel=1e-9)


def _in_turns(**change: float) -> ImaginedRun:
    """Four ranks on a slow network, each of which is independently late by 3 ms now and then."""
    base: dict[str, Any] = {"ranks": 4, "iterations": 16, "layers": 4, "noise": 0.02, "chance_us": 3_000.0}
    more = {"kernel_us": 200.0, "between_us": 4.0, "bandwidth_bytes_per_us": 6000.0}
    return simulate(ImaginedRun(**base | more | change))


def _mean_ns(of: ImaginedRun, iterations: list[int]) -> float:
    return 1e3 * float(np.mean([max(rank[i] for rank in of.iteration_us) for i in iterations]))


def test_what_waiting_adds_is_not_scaled_by_a_change(tmp_path: Path) -> None:
    """The same random delays on another network. (Stretching all times equally would be up to 13% off.)"""
    run = Run(measured=measured(tmp_path, _in_turns()))
    assert run.stretch > 1.05 and not run.doubts
    for factor in (4.0, 0.25):
        truth = _mean_ns(_in_turns(bandwidth_bytes_per_us=6000.0 * factor), run.iterations)
        ns, doubt = run.judged(apply(run.graph, f"bandwidth={factor}"))
        assert not doubt and ns == pytest.approx(truth, rel=0.005)
    assert run.changed_ns(run.graph) == run.replayed_ns


def test_another_graph_is_no_answer_where_waiting_adds_much(tmp_path: Path) -> None:
    run = Run(measured=measured(tmp_path, _in_turns()))
    other = replace(run.graph, priority=run.graph.priority + 1)
    assert "its median time" in run.judged(other)[1]
    with pytest.raises(Infeasible, match="its median time") as e:
        run.must_be_believed("x", force=False)
    assert e.value.where == "x" and "--force" in e.value.fix


def test_balance_takes_turns_at_being_late_away(tmp_path: Path) -> None:
    """Random delays are not in any rank's median, but balancing removes the time that they add."""
    run = Run(measured=measured(tmp_path, _in_turns()))
    even = max(evaluate(run.medians).values())
    balanced = run.changed_ns(apply(run.graph, "balance=1"))
    none = _mean_ns(_in_turns(chance_us=0.0), run.iterations)
    assert none < balanced < even < run.replayed_ns


def test_gaps_that_depend_on_ops_call_a_run_into_question() -> None:
    """The second op begins at a fixed time, however long the first one takes, so less work would change nothing."""
    events, marks, us = [], [], 1000
    for k, gap in enumerate((5, 45, 10, 40, 8, 42, 5, 45)):
        op: dict[str, Any] = {"rank": 0, "lane": "s", "device": True, "iteration": k, "kind": "kernel"}
        z = k * 1100 * us
        events.append(Event(name="first", start_ns=z, duration_ns=(1000 - gap) * us, **op))
        events.append(Event(name="second", start_ns=z + 1000 * us, duration_ns=100 * us, **op))
        marks.append(Mark(rank=0, iteration=k, start_ns=z, end_ns=z + 1100 * us))
    run = Run(measured=measure(align(from_events(events, marks=tuple(marks)))))
    assert run.error() < 1e-9 and run.gaps_errors is not None and run.gaps_errors[0] > 0.01
    assert "gaps are not constant" in "; ".join(run.doubts)


def test_what_ifs_are_refused_where_replay_is_not_to_be_believed(tmp_path: Path) -> None:
    """Some kernels begin 20 ms late for no known reason, so a large part of the critical path is unexplained."""
    path, _ = running_ahead(tmp_path, wobble=False)
    document = json.loads(path.read_text())
    shift = 0.0
    for e in sorted((e for e in document["traceEvents"] if e["cat"] == "kernel"), key=lambda e: e["ts"]):
        shift += 20_000.0 if e["name"] in ("gemm_30", "gemm_60", "gemm_90") else 0.0
        e["ts"] += shift
    path.write_text(json.dumps(document))
    measured = Run(measured=measure(load(path)))
    assert measured.unexplained > 0.3 and measured.headline.startswith("Do not rely")
    with pytest.raises(Infeasible, match="nothing in the trace explains") as e:
        measured.must_be_believed("x", force=False)
    assert e.value.where == "x"
    code, _, err = run("replay", path, "--what-if", "op:gemm=0.5")
    assert code == 1 and "--force" in err
    assert "Do not rely" in printed("replay", path, "--what-if", "op:gemm=0.5", "--force").splitlines()[0]


def _by_itself(tmp_path: Path, works_us: float) -> Path:
    """A second thread launches 30 ms after the step began, for no known reason. The main thread works, then waits."""
    events: list[dict[str, Any]] = []
    for step in range(5):
        z = 40_000.0 * step
        host = {"ph": "X", "pid": 0, "cat": "cuda_runtime"}
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
        events.append({**mark, "ts": z, "dur": 40_000.0})
        for k, (tid, at) in enumerate(((1, z + 10), (2, z + 30_000))):
            number = {"correlation": 2 * step + k}
            events.append(
                {**host, "tid": tid, "name": "cudaLaunchKernel", "ts": at, "dur": 5.0, "args": number}
            )
            kernel = {"ph": "X", "cat": "kernel", "name": f"gemm_{k}", "pid": 0, "tid": 7, "dur": 5_000.0}
            events.append({**kernel, "ts": at + 8, "args": numbered(2 * step + k)})
        work = {"ph": "X", "pid": 0, "cat": "cpu_op", "tid": 1, "name": "aten::work"}
        events.append({**work, "ts": z + 20, "dur": works_us})
        begin, end = z + 20 + works_us, z + max(35_015.0, 40 + works_us)
        events.append({**host, "tid": 1, "name": "cudaDeviceSynchronize", "ts": begin, "dur": end - begin})
    path = tmp_path / "late.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_thread_that_begins_by_itself_is_unexplained(tmp_path: Path) -> None:
    measured = Run(measured=measure(load(_by_itself(tmp_path, 0.0))))
    assert measured.replayed_ns == pytest.approx(40e6, rel=1e-3)
    assert 0.5 < measured.unexplained < 0.8 and "nothing in the trace explains" in measured.headline


def test_a_hand_over_that_is_long_now_and_then_is_unexplained(tmp_path: Path) -> None:
    """In some iterations, a second thread begins 4 ms after the first one stopped; in the others, immediately."""
    shares = []
    for wait in (0.0, 4_000.0):
        events: list[dict[str, Any]] = []
        z = 0.0
        for step in range(8):
            late = wait if step in (3, 5) else 0.0
            length = 21_000.0 + late
            mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
            events.append({**mark, "ts": z, "dur": length})
            work = {"ph": "X", "pid": 0, "cat": "cpu_op", "name": "aten::work"}
            events.append({**work, "tid": 1, "ts": z, "dur": 400.0})
            events.append({**work, "tid": 2, "ts": z + 500 + late, "dur": 19_900.0})
            for k, (tid, at) in enumerate(
                ((1, 390), (2, 600 + late), (2, 20_300 + late), (1, 20_600 + late))
            ):
                args = {"correlation": 4 * step + k}
                call = {"ph": "X", "pid": 0, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": tid}
                events.append({**call, "ts": z + at, "dur": 5.0, "args": args})
                kernel = {"ph": "X", "cat": "kernel", "name": f"gemm_{k}", "pid": 0, "tid": 7, "dur": 50.0}
                events.append({**kernel, "ts": z + at + 8, "args": numbered(4 * step + k)})
            z += length
        path = tmp_path / f"{wait}.json"
        path.write_text(json.dumps({"traceEvents": events}))
        shares.append(Run(measured=measure(load(path))).unexplained)
    assert shares[0] == 0 and shares[1] > 0.03


def test_a_what_if_that_ends_in_unexplained_delay_is_refused(tmp_path: Path) -> None:
    """The main thread's work determines the iteration. If it were half as long, the unexplained delay would."""
    path = _by_itself(tmp_path, 39_000.0)
    assert Run(measured=measure(load(path))).unexplained == 0
    code, _, err = run("replay", path, "--what-if", "host=0.5")
    assert code == 1 and "nothing in the trace explains" in " ".join(err.split())
    assert run("replay", path, "--what-if", "host=0.5", "--force")[0] == 0
    assert run("replay", path, "--what-if", "op:gemm=0.5")[0] == 0


def test_a_replay_far_from_its_own_run_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    folder = write(simulate(ImaginedRun(ranks=1, iterations=4)), tmp_path / "x")
    monkeypatch.setattr(Run, "replayed_ns", property(lambda self: 8e9))
    code, out, err = run("replay", folder)
    assert code == 1 and not out
    assert "takes 8000.00 ms" in err and "--force" in err and "pase diagnose" in err
    assert "Do not rely" in printed("replay", folder, "--force").splitlines()[0]
    assert run("diagnose", folder)[0] == 0


def test_a_rank_that_is_late_by_itself_is_what_balance_takes_away() -> None:
    """The delay is unexplained, so other changes of the run cannot be trusted. Balancing removes the delay."""
    facts = facts_of_step(2)
    late, even = (
        Run(measured=measure(align(timeline_of_steps(facts, ranks=2, late_us=u)))) for u in (5000, 0)
    )
    assert late.unexplained > 0.5 and late.doubts and not even.doubts
    ns, doubt = late.judged(apply(late.graph, "balance=1"))
    assert not doubt and ns == pytest.approx(even.replayed_ns, rel=0.05)
    assert "nothing in the trace explains" in late.judged(apply(late.graph, "bandwidth=2"))[1]
