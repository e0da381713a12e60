"""Runs whose replay can or cannot be trusted: few iterations, CPUs that run ahead, stragglers, unexplained delays."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from bench.replay.whatif import answered, questions
from pase.errors import Infeasible
from pase.replay.changes.whatif import apply
from pase.replay.measurement.breakdown import breakdowns
from pase.replay.measurement.clocks import align
from pase.replay.measurement.iterations import Iteration, warm_up
from pase.replay.measurement.model import Measured, measure
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from pase.replay.types import Event, Mark, Timeline, from_events
from tests.command import printed, reported, run

SHARED = Path(__file__).parents[3] / ".." / "shared" / "data" / "traces"
TRACES = ["hta/nccl_parser_config_nccl_data.json.gz", "hta/df_index_resolver_df_index_resolver.json.gz"]
TRACES += ["hta/trace_diff_control_control.json.gz", "jaxtoolbox_pax_fsdp4"]


def _measured(tmp_path: Path, run: ImaginedRun) -> Measured:
    return measure(align(load(write(run, tmp_path / "traces"))))


def _ahead(tmp_path: Path, wobble: bool = True, slow: int = -1) -> tuple[Path, list[float]]:
    """Writes a trace of one stream with 100 kernels of 1 ms per step. Returns its path and the true lengths in ms.

    The CPU launches a step in 10 to 60 ms. If ``slow`` is given, it launches that step in 260 ms, half of it work, and
    all others in 10 ms.
    """
    events: list[dict[str, Any]] = []
    rng = np.random.default_rng(3)
    host, device, number = 0.0, 0.0, 0
    ends = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    for step in range(8):
        begun = host
        pause = float(rng.uniform(100, 600)) if wobble else 300.0
        if slow >= 0:
            pause = 2600.0 if step == slow else 100.0
        for k in range(100):
            number += 1
            span("cpu_op", "aten::mm", 1, host, pause / 2)
            host += pause
            span("cuda_runtime", "cudaLaunchKernel", 1, host, 5, correlation=number)
            begin = max(host + 8, device + 1)
            device = begin + 1000
            span("kernel", f"gemm_{k}", 7, begin, 1000, stream=7, device=0, correlation=number)
            host += 5
        span("user_annotation", f"ProfilerStep#{step}", 1, begun, host - begun)
        ends.append(device)
    path = tmp_path / "ahead.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path, [float(x) / 1e3 for x in np.diff(ends)]


def test_a_cpu_that_runs_ahead_does_not_change_what_is_measured(tmp_path: Path) -> None:
    path, truth = _ahead(tmp_path)
    m = measure(load(path))
    assert list(m.left_out) == [0] and "nothing shows where the previous iteration ended" in m.left_out[0]
    assert [m.measured_ns[0, i] / 1e6 for i in m.steady()] == pytest.approx(truth, rel=1e-6)
    run = Run(measured=m)
    assert not run.doubts
    assert run.replayed_ns / 1e6 == pytest.approx(truth[0], rel=2e-3)
    assert run.error(worst=True) < 2e-3
    # A faster CPU changes nothing, and faster kernels change the whole iteration.
    assert max(evaluate(apply(run.graph, [("host", "", 1.5)])).values()) == pytest.approx(
        run.replayed_ns, rel=0.01
    )
    faster = max(evaluate(apply(run.graph, [("op", "gemm", 0.8)])).values())
    assert faster == pytest.approx(0.8 * run.replayed_ns, rel=0.01)


def test_a_slow_launch_behind_others_that_are_ahead_starves_no_device(tmp_path: Path) -> None:
    """The slow iteration is not replayed as if the CPU had launched all earlier ones as slowly."""
    path, truth = _ahead(tmp_path, wobble=False, slow=2)
    run = Run(measured=measure(load(path)))
    assert truth == pytest.approx([truth[0]] * len(truth), rel=1e-3)
    assert run.error(worst=True) < 2e-3


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
            assert (worst is None and "its error is unknown" in run.headline) or run.doubts


def _cut(t: Timeline, count: int) -> Timeline:
    """Returns the first ``count`` iterations, with everything that they launched."""
    numbers = sorted({m.iteration for m in t.marks})[:count]
    keep = np.isin(t["iteration"], numbers)
    return replace(t.select(keep), marks=tuple(m for m in t.marks if m.iteration in numbers))


@pytest.mark.parametrize(
    "shape", [{"kernel_us": 300.0, "between_us": 4.0}, {"kernel_us": 12.0, "between_us": 60.0}]
)
def test_parts_sum_to_the_iteration_and_the_path_to_the_replay(tmp_path: Path, shape: dict[str, Any]) -> None:
    m = _measured(tmp_path, simulate(ImaginedRun(ranks=2, noise=0.05, **shape)))
    for b in breakdowns(m):
        assert sum(b.parts.values()) == b.total_ns
        assert b.total_ns == sum(round(m.measured_ns[b.rank, i]) for i in b.iterations)
    run = Run(measured=m)
    assert sum(s.added_ns for s in run.replay.path()) == pytest.approx(run.replayed_ns, rel=1e-9)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_late_by_hand_is_named_and_balance_helps(tmp_path: Path, rank: int, ranks: int) -> None:
    """The rank's host works 5 ms longer before the first launch of each step."""
    late = 5000.0
    run = simulate(
        ImaginedRun(ranks=ranks, iterations=6, slow_rank=rank, late_us=late, kernel_us=200.0, between_us=4.0)
    )
    m = _measured(tmp_path, run)
    d = diagnose_run(m)
    f = next(f for f in d.findings if f.kind == "straggler")
    assert f"wait for rank {rank}" in f.title and f.measured_ns > 0.8 * late * 1e3
    assert all(s.where == "host" for s in d.stragglers if s.rank == rank and s.caused_ns > 1e6)
    balanced = max(evaluate(apply(d.run.graph, [("balance", "", 1.0)])).values())
    assert balanced < d.run.replayed_ns
    even = simulate(ImaginedRun(ranks=ranks, iterations=6, kernel_us=200.0, between_us=4.0))
    assert balanced == pytest.approx(np.median(even.iteration_us[0][1:]) * 1e3, rel=0.02)


def test_a_replay_is_as_long_as_the_iterations_are_on_average(tmp_path: Path) -> None:
    """Ranks are late in turn, so a replay of medians is too short. The replay of means predicts well."""
    late = simulate(
        ImaginedRun(ranks=4, iterations=16, noise=0.02, chance_us=1000.0, kernel_us=200.0, between_us=4.0)
    )
    run = Run(measured=_measured(tmp_path, late))
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
    run = Run(measured=_measured(tmp_path, _in_turns()))
    assert run.stretch > 1.05 and not run.doubts
    for factor in (4.0, 0.25):
        truth = _mean_ns(_in_turns(bandwidth_bytes_per_us=6000.0 * factor), run.iterations)
        ns, doubt = run.judged(apply(run.graph, [("bandwidth", "", factor)]))
        assert not doubt and ns == pytest.approx(truth, rel=0.005)
    assert run.changed_ns(run.graph) == run.replayed_ns


def test_another_graph_is_no_answer_where_waiting_adds_much(tmp_path: Path) -> None:
    run = Run(measured=_measured(tmp_path, _in_turns()))
    other = replace(run.graph, priority=run.graph.priority + 1)
    assert "its median time" in run.judged(other)[1]
    with pytest.raises(Infeasible, match="its median time") as e:
        run.must_be_believed("x", force=False)
    assert e.value.where == "x" and "--force" in e.value.fix


def test_balance_takes_turns_at_being_late_away(tmp_path: Path) -> None:
    """Random delays are not in any rank's median, but balancing removes the time that they add."""
    run = Run(measured=_measured(tmp_path, _in_turns()))
    even = max(evaluate(run.medians).values())
    balanced = run.changed_ns(apply(run.graph, [("balance", "", 1.0)]))
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


def test_iterations_that_are_left_out() -> None:
    """Warm-up at the beginning and a checkpoint in the middle are left out; a later one that is 7% longer is not."""
    lengths = [1120, 1070, 1000, 1010, 1070, 1500, 990, 1000]
    of = {
        (0, k): Iteration(rank=0, number=k, begin_ns=10**6 * k, end_ns=10**6 * k + n, ops=9)
        for k, n in enumerate(lengths)
    }
    assert list(warm_up(of)) == [0, 1, 5] and "longer than the others" in warm_up(of)[5]


def test_time_inside_of_a_launching_call_is_the_hosts(tmp_path: Path) -> None:
    """The driver loads a module for 8 ms within the second launch of each step."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        z = 20_000.0 * step
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
        events.append({**mark, "ts": z, "dur": 20_000.0})
        for k, (at, long) in enumerate(((100.0, 10.0), (1000.0, 8000.0))):
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 0, "tid": 1}
            number = 2 * step + k
            events.append({**call, "ts": z + at, "dur": long, "args": {"correlation": number}})
            kernel = {"ph": "X", "cat": "kernel", "name": f"gemm_{k}", "pid": 0, "tid": 7, "dur": 500.0}
            events.append({**kernel, "ts": z + at + long + 2, "args": _args(number)})
    path = tmp_path / "module.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (b,) = breakdowns(measure(load(path)))
    assert b.mean_ns("unexplained") == 0 and b.mean_ns("compute") == 1e6
    assert b.mean_ns("launch") > 18.9e6 and sum(b.parts.values()) == b.total_ns


def test_a_blocking_copy_is_found_and_named(tmp_path: Path) -> None:
    """A copy of 704 bytes is short on the device, but blocks the CPU until all earlier ops have ended."""
    events: list[dict[str, Any]] = []
    at, number = 0.0, 0
    for step in range(5):
        begun = at
        for k in range(20):
            number += 1
            kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 990.0}
            events.append({**kernel, "ts": begun + 20 + 1000 * k, "args": _args(number)})
            call = {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 0,
                "tid": 1,
                "dur": 5.0,
            }
            events.append({**call, "ts": at, "args": {"correlation": number}})
            at += 10
        number += 1
        done = begun + 20_100
        copy = {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH (Device -> Pageable)",
            "pid": 0,
            "tid": 7,
        }
        events.append({**copy, "ts": done, "dur": 2.0, "args": {**_args(number), "bytes": 704}})
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 0, "tid": 1, "ts": at}
        events.append({**call, "dur": done + 10 - at, "args": {"correlation": number}})
        item = {"ph": "X", "cat": "cpu_op", "name": "aten::item", "pid": 0, "tid": 1, "ts": at - 1}
        events.append({**item, "dur": done + 12 - at})
        at = done + 5000.0
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 0, "tid": 1}
        events.append({**mark, "ts": begun, "dur": at - begun})
    path = tmp_path / "copy.json"
    path.write_text(json.dumps({"traceEvents": events}))
    d = diagnose_run(measure(load(path)))
    f = next(f for f in d.findings if f.kind == "blocking-calls")
    assert "704 bytes" in f.title and "aten::item" in f.detail
    assert f.measured_ns == pytest.approx(19.9e6, rel=0.01)
    (b,) = d.breakdowns
    assert b.mean_ns("blocking") == pytest.approx(5e6, rel=0.02)


def _args(number: int) -> dict[str, Any]:
    return {"stream": 7, "device": 0, "correlation": number}


def test_reports_name_the_same_iteration_and_one_clock(tmp_path: Path) -> None:
    run = ImaginedRun(
        ranks=2, iterations=5, bucket_layers=1, bucket_bytes=1 << 18, bucket_growth=0.2, noise=0.02
    )
    folder = write(simulate(run), tmp_path / "x")
    reports = {}
    for command in ("replay", "diagnose", "optimize"):
        reports[command] = reported(command, folder)
    for key in ("measured_s", "replayed_s", "headline", "held_out_error", "naive_error", "unexplained"):
        assert reports["replay"][key] == reports["diagnose"][key] == reports["optimize"][key]
    o = reports["optimize"]
    assert o["before_s"] == o["replayed_s"] == reports["diagnose"]["iteration_s"]
    chain = [o["before_s"], *(s["after_s"] for s in o["steps"])]
    assert [s["before_s"] for s in o["steps"]] == chain[:-1] and o["after_s"] == chain[-1]
    whole = sum(reports["replay"]["critical_path"].values())
    assert whole == pytest.approx(o["replayed_s"], rel=1e-9)
    for f in reports["diagnose"]["findings"]:
        assert all(0 <= e["start_s"] < 1 for e in f["evidence"])


def test_what_ifs_are_refused_where_replay_is_not_to_be_believed(tmp_path: Path) -> None:
    """Some kernels begin 20 ms late for no known reason, so a large part of the critical path is unexplained."""
    path, _ = _ahead(tmp_path, wobble=False)
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
            events.append({**kernel, "ts": at + 8, "args": _args(2 * step + k)})
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
                events.append({**kernel, "ts": z + at + 8, "args": _args(4 * step + k)})
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


@pytest.mark.parametrize(
    "question",
    [
        "launch-bound: four light kernels a layer fused",
        "buckets of 8 MiB: 4 sent as one",
        "one of 2 ranks 1.4 times slower: balance=1",
    ],
)
def test_what_ifs_meet_the_run_that_changed(question: str) -> None:
    """Three of the questions of ``bench/replay/whatif.py``."""
    (row,) = [answered(q) for q in questions() if q.name == question]
    assert abs(row["error"]) < 0.02 and not row["refused"]


def test_one_iteration_states_no_error(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=1, iterations=1)), tmp_path / "x")
    report = reported("replay", folder)
    assert "unknown" in report["headline"]
    assert [r["error"] for r in report["ranks"]] == [None]
    assert [i["error"] for i in report["iterations"]] == [None]
    assert "0.00%" not in printed("replay", folder).replace("0.0% of", "")


def test_correlation_ids_used_again_are_paired_in_time(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=1, iterations=4))
    events = run.events[0]
    per_step = sum("correlation" in e["args"] for e in events if e["cat"] == "kernel") // 4
    for e in events:
        if "correlation" in e["args"]:
            e["args"]["correlation"] = (e["args"]["correlation"] - 1) % per_step
    folder = write(run, tmp_path / "x")
    m = measure(load(folder))
    assert len({m.iteration_of[0, i].ops for i in m.iterations()}) == 1
    want = Run(measured=_measured(tmp_path / "own", simulate(ImaginedRun(ranks=1, iterations=4))))
    assert Run(measured=m).measured_ns == want.measured_ns


def test_reports_fit_eighty_columns(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = write(simulate(ImaginedRun(ranks=3, iterations=4, skew_us=(0.0, 25e3, -17e3))), tmp_path / "x")
    for command in ("replay", "diagnose", "optimize"):
        lines = printed(command, folder).splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)


def test_a_cut_file_leaves_its_last_iteration_out(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=1, iterations=4)), tmp_path / "x")
    path = folder / "rank0.json.gz"
    with gzip.open(path, "rt") as f:
        document = json.load(f)
    last = max(e["ts"] for e in document["traceEvents"] if e["cat"] == "kernel")
    kept = [e for e in document["traceEvents"] if e["cat"] != "kernel" or e["ts"] < last - 3000]
    with gzip.open(path, "wt") as f:
        json.dump({**document, "traceEvents": kept}, f)
    m = measure(load(folder))
    assert 3 in m.left_out and "no device op" in m.left_out[3]


@pytest.mark.parametrize("seed", [31, 44, 51])
def test_a_pool_of_threads_starts_no_circle(tmp_path: Path, seed: int) -> None:
    """Workers launch in turn. Each idles while another works, so each might have started the other."""
    rng = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    for tid in (2, 3, 4):
        at = float(rng.uniform(0, 500))
        for _ in range(6):
            works = float(rng.uniform(100, 900))
            span("cpu_op", "aten::mm", tid, at, works)
            for call in (at + 10, at + works - 30):
                number = len(events)
                span("cuda_runtime", "cudaLaunchKernel", tid, call, 5, correlation=number)
                span("kernel", f"k{number}", 7 + tid, call + 8, 20, stream=7 + tid, correlation=number)
            at += works + float(rng.uniform(50, 1500))
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"traceEvents": events}))
    run = Run(measured=measure(load(path)))
    assert run.replayed_ns == pytest.approx(run.measured_ns, rel=0.1) or run.doubts
