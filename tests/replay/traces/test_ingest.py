"""Folders of traces: ranks, iterations and launches, and files that are broken or missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, trace, write
from pase.errors import PaseError
from pase.replay.measurement.model import measure
from pase.replay.reports.trust import Run
from pase.replay.traces.ingest import load
from pase.replay.types import KINDS
from tests.replay.runs import measured
from tests.replay.traces.files import kernel, trace_file


def test_a_kineto_event_keeps_what_replay_needs(tmp_path: Path) -> None:
    t = load(write(simulate(ImaginedRun(ranks=2, iterations=2)), tmp_path / "x"))
    assert t.ranks == (0, 1)
    e = next(x for x in t if x.kind == "collective")
    assert (e.operation, e.nbytes, e.lane) == ("all_reduce", 25 << 20, "20")
    assert t.groups[0].ranks == (0, 1)
    assert not t.problems
    launches = {
        c for c, k in zip(t["correlation"], t["kind"], strict=True) if KINDS[k] == "runtime" and c >= 0
    }
    assert {x.correlation for x in t if x.device} == launches


def test_a_cut_trace_gives_what_came_before_the_cut(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=1, iterations=4))
    text = json.dumps(trace(run, 0))
    (tmp_path / "a.json").write_text(text[: len(text) // 2])
    packed = gzip.compress(text.encode())
    (tmp_path / "b.json.gz").write_bytes(packed[: len(packed) // 2])
    for name in ("a.json", "b.json.gz"):
        t = load(tmp_path / name)
        assert 0 < len(t) < len(load(_write_whole(tmp_path, text)))
        assert any("cut or damaged" in str(p) for p in t.problems)


def _write_whole(tmp_path: Path, text: str) -> Path:
    (tmp_path / "whole.json").write_text(text)
    return tmp_path / "whole.json"


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=1, iterations=2))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(trace(run, 0)))
    t = load(tmp_path)
    assert t.ranks == (0,)
    assert any("already taken" in str(p) for p in t.problems)


def test_ranks_come_from_names_where_the_files_do_not_say(tmp_path: Path) -> None:
    for r in range(2):
        (tmp_path / f"rank{r}.json").write_text(json.dumps({"traceEvents": [kernel(1)]}))
    assert load(tmp_path).ranks == (0, 1)


def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=3, iterations=2)), tmp_path / "x")
    (folder / "rank1.json.gz").unlink()
    t = load(folder)
    assert any("1 of 3 ranks have no trace (1)" in str(p) for p in t.problems)


def test_one_bad_file_does_not_spoil_the_others(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=2, iterations=2)), tmp_path / "x")
    (folder / "notes.json").write_text('{"hello": 1}')
    t = load(folder)
    assert t.ranks == (0, 1)
    assert any("notes.json" in p.where for p in t.problems)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"{}", '"traceEvents"'),
        (b"not json", "not a JSON trace"),
        (b'{"traceEvents": []}', "no usable event"),
        (b'{"traceEvents": [{"ph": "X"}]}', "no usable event"),
        (b"\x1f\x8b" + b"\x00" * 40, "not readable"),
    ],
)
def test_unusable_files_say_why_and_where(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(PaseError, match=words) as e:
        load(path)
    assert e.value.where == str(path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(PaseError, match="no trace found") as e:
        load(tmp_path)
    assert e.value.where == str(tmp_path)


JUNK = (None, True, -1, 1e308, 2**70, "x", [], {}, [[]], {"a": {}}, 3.7, "12")


@pytest.mark.parametrize("seed", range(12))
def test_spoilt_traces_are_used_as_far_as_sound_or_refused(tmp_path: Path, seed: int) -> None:
    """With random damage to events, the whole chain works or raises one error that says why not."""
    import random

    from pase.replay.measurement.clocks import align
    from pase.replay.measurement.model import measure
    from pase.replay.reports.diagnose import diagnose_run

    rng = random.Random(seed)
    run = simulate(ImaginedRun(ranks=2, iterations=3, layers=6))
    for r in range(2):
        events = trace(run, r)["traceEvents"]
        for _ in range(rng.choice([3, 40, 300])):
            e = rng.choice(events)
            how = rng.randrange(5)
            if not isinstance(e, dict) or not e:
                continue
            if how == 0:
                e[rng.choice(list(e))] = rng.choice(JUNK)
            elif how == 1 and isinstance(e.get("args"), dict) and e["args"]:
                e["args"][rng.choice(list(e["args"]))] = rng.choice(JUNK)
            elif how == 2:
                events.remove(e)
            elif how == 3:
                events[rng.randrange(len(events))] = rng.choice(JUNK)
            elif isinstance(e.get("ts"), float):
                e["ts"] += rng.uniform(-1e5, 1e5)
        (tmp_path / f"rank{r}.json").write_text(json.dumps(trace(run, r)))
    try:
        found = diagnose_run(measure(align(load(tmp_path))))
    except PaseError as e:
        assert len(str(e)) > 20
    else:
        assert found.iteration_ns > 0


def test_a_missing_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ijson", None)
    with pytest.raises(PaseError, match=r"needs ijson: pip install '"):
        load(trace_file(tmp_path, [kernel(1)]))


def test_what_is_said_of_a_damaged_trace_commands_no_terminal(tmp_path: Path) -> None:
    for k, text in enumerate(
        (b'{"traceEvents": [{"ph": "X", \x1b[2J', b"\x1b[2J", b'{"traceEvents": [{"ph": "\x1b[2J"}]}')
    ):
        path = tmp_path / f"rank{k}.json"
        path.write_bytes(text)
        with pytest.raises(PaseError) as refused:
            load(path)
        assert "\x1b" not in str(refused.value)


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
    want = Run(measured=measured(tmp_path / "own", simulate(ImaginedRun(ranks=1, iterations=4))))
    assert Run(measured=m).measured_ns == want.measured_ns


def _lagging(before: int) -> list[dict]:
    """Three host steps of 100 µs with four launches each, and a device that lags 150 µs behind.

    The device first runs ops that were launched before the trace began.
    """
    step = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1}
        | {"ts": 100 * i, "dur": 100}
        for i in range(3)
    ]
    calls = [
        kernel(0, cat="cuda_runtime", name="cudaLaunchKernel", pid=1, tid=1, ts=10 + 25 * i, dur=2)
        | {"args": {"correlation": 1000 + i}}
        for i in range(12)
    ]
    ops = [
        kernel(i % 4, ts=20 + 25 * k, dur=25, args={"stream": 7, "correlation": 1000 + i})
        for k, i in enumerate(range(-before, 12))
    ]
    return [*step, *calls, *ops]


def test_ops_launched_before_the_trace_are_in_no_iteration(tmp_path: Path) -> None:
    t = load(trace_file(tmp_path, _lagging(before=6)))
    on_device = t["kind"] == KINDS.index("kernel")
    number = t["iteration"][on_device][np.argsort(t["start_ns"][on_device])]
    assert number.tolist() == [-1] * 6 + [0] * 4 + [1] * 4 + [2] * 4


def test_traces_of_different_runs_are_told_from_ranks_of_one(tmp_path: Path) -> None:
    one = write(simulate(ImaginedRun(ranks=2, iterations=2)), tmp_path / "one")
    assert not any("in common" in str(p) for p in load(one).problems)
    for name, other in (("rank0", "gemm"), ("rank1", "gemm"), ("rank2", "conv")):
        events = [kernel(i, name=f"{other}_{i % 3}_{'abcde'[i % 5]}") for i in range(20)]
        trace_file(tmp_path, events, distributedInfo={"rank": int(name[-1])}).rename(
            tmp_path / f"{name}.json"
        )
    said = [
        str(p) for p in load([tmp_path / f"rank{r}.json" for r in range(3)]).problems if "in common" in str(p)
    ]
    assert len(said) == 1 and said[0].startswith("rank 2: it has 0% of its ops in common with rank")


def test_reading_tells_which_file_of_how_many(tmp_path: Path) -> None:
    told: list[str] = []
    load(write(simulate(ImaginedRun(ranks=3, iterations=2)), tmp_path / "x"), progress=told.append)
    assert [t.partition(" (")[2] for t in told] == ["1 of 3)", "2 of 3)", "3 of 3)"]
