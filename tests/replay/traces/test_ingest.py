"""Reading traces: their contents, and the handling of broken or malicious traces."""

from __future__ import annotations

import gzip
import json
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, trace, write
from pase.errors import PaseError
from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import Limits, open_stream
from pase.replay.traces.timeline_io import (
    chrome_trace,
    from_json,
    load_timeline,
    save_timeline,
    schema,
    to_json,
)
from pase.replay.types import KINDS, OPERATIONS, Event, Mark, from_events


def _kernel(i: int, **more: object) -> dict:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"k{i}",
        "pid": 0,
        "tid": 7,
        "ts": 10 * i,
        "dur": 5,
        "args": {"stream": 7},
        **more,
    }


def _file(tmp_path: Path, events: list, **header: object) -> Path:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


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


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*)", "broadcast"),
    ],
)
def test_nccl_kernels_old_and_new(tmp_path: Path, name: str, operation: str) -> None:
    t = load(_file(tmp_path, [_kernel(0, name=name)]))
    assert (KINDS[t["kind"][0]], OPERATIONS[t["operation"][0]]) == ("collective", operation)


def test_times_keep_nanoseconds_at_unix_epoch(tmp_path: Path) -> None:
    t = load(_file(tmp_path, [_kernel(0, ts=1669783687464181, dur=1.5)]))
    assert t["start_ns"][0] == 1669783687464181000
    assert t["duration_ns"][0] == 1500


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


def test_nan_and_infinity_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    good = json.dumps(_kernel(1))
    path.write_text(
        '{{"traceEvents": [{}, {}, {}]}}'.format(
            good,
            good.replace('"ts": 10', '"ts": NaN'),
            good.replace('"dur": 5', '"dur": 5, "x": -Infinity'),
        )
    )
    t = load(path)
    assert len(t) == 2
    text = " ".join(map(str, t.problems))
    assert "2 bare NaN or Infinity" in text
    assert "1 events whose time is not a finite number" in text


def test_negative_absurd_and_foreign_entries_are_left_out(tmp_path: Path) -> None:
    t = load(
        _file(tmp_path, [_kernel(1), _kernel(2, dur=-4), _kernel(3, ts=1e300), 7, None, _kernel(4, ts="x")])
    )
    assert len(t) == 1
    text = " ".join(map(str, t.problems))
    assert "2 events with a negative or absurd time" in text
    assert "2 entries that are not events" in text


def test_a_clock_jump_keeps_the_longest_stretch(tmp_path: Path) -> None:
    t = load(_file(tmp_path, [*(_kernel(i) for i in range(9)), _kernel(9, ts=1e13)]))
    assert len(t) == 9
    assert any("clock jumps" in str(p) for p in t.problems)


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=1, iterations=2))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(trace(run, 0)))
    t = load(tmp_path)
    assert t.ranks == (0,)
    assert any("already taken" in str(p) for p in t.problems)


def test_ranks_come_from_names_where_the_files_do_not_say(tmp_path: Path) -> None:
    for r in range(2):
        (tmp_path / f"rank{r}.json").write_text(json.dumps({"traceEvents": [_kernel(1)]}))
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


def _peak_mib(work) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize("nest", [b"[" * 3_000_000, b"[ " * 3_000_000, b'{"a":' * 2_000_000])
def test_deep_nesting(tmp_path: Path, nest: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [' + json.dumps(_kernel(1)).encode() + b', {"args": ' + nest)

    def read() -> None:
        try:
            t = load(path)
        except PaseError as e:
            assert "deep" in str(e)
        else:
            assert any("cut or damaged" in str(p) for p in t.problems)

    assert _peak_mib(read) < 512


def test_a_zip_bomb_in_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as f:
        f.write(b'{"traceEvents": [')
        for _ in range(200):
            f.write(b" " * (1 << 20))
        f.write(b"]}")
    with pytest.raises(PaseError, match=r"bomb|without an event"):
        load(path)


def test_one_event_repeated_past_the_ratio(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    block = (json.dumps(_kernel(1)) + ",").encode() * 8000
    with gzip.open(path, "wb", compresslevel=9) as f:
        f.write(b'{"traceEvents": [')
        for _ in range(12):
            f.write(block)
        f.write(b"{}]}")
    with pytest.raises(PaseError, match=r"more than 4 MiB|zip bomb"):
        read_chrome(path, limits=Limits(file_bytes=4 << 20))


@pytest.mark.parametrize("more", [b"", gzip.compress(b" ")], ids=["one member", "a small member after it"])
def test_a_bomb_is_refused_before_its_events_are_read(tmp_path: Path, more: bytes) -> None:
    """Parsing the decompressed data would take many seconds."""
    block = (json.dumps(_kernel(1)) + ",").encode() * 8000
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + block * 150, 9) + more)
    with pytest.raises(PaseError, match="zip bomb") as e:
        open_stream(path)
    assert e.value.where == str(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + block, 9) + more)
    with open_stream(path) as stream:
        assert stream.read().startswith(b'{"traceEvents": [')


def test_a_zip_bomb_in_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "p0.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z,
        z.open("nvtx_gpu_proj_trace/trace.parquet", "w") as f,
    ):
        for _ in range(520):
            f.write(b"\0" * (1 << 20))
    with pytest.raises(PaseError, match="MiB unpacked"):
        load(path)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p0.zip"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("readme", "hello")
    with pytest.raises(PaseError, match="not an nsys-jax archive"):
        load(path)


def test_countless_threads_and_names_stay_within_limits(tmp_path: Path) -> None:
    limits = Limits(lanes=50, names=20)
    events = [_kernel(i, tid=i, args={"stream": i}) for i in range(400)]
    t = read_chrome(_file(tmp_path, events), limits=limits)
    assert len(t.lanes) == 50
    assert len(t.names) <= 21
    text = " ".join(map(str, t.problems))
    assert "350 events on threads beyond the first 50" in text
    assert "names beyond the first 20" in text


def test_a_giant_string(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"traceEvents": [' + json.dumps(_kernel(1)).encode() + b', {"name": "' + b"x" * (12 << 20) + b'"}]}'
    )
    with pytest.raises(PaseError, match="without an event"):
        load(path)


def test_begin_and_end_events_are_paired(tmp_path: Path) -> None:
    events = [
        {"ph": p, "name": "f", "pid": 1, "tid": 1, "ts": ts}
        for p, ts in (("B", 1), ("B", 2), ("E", 5), ("E", 9))
    ]
    t = load(_file(tmp_path, events))
    assert sorted(
        zip((t["start_ns"] // 1000).tolist(), (t["duration_ns"] // 1000).tolist(), strict=True)
    ) == [(1, 8), (2, 3)]


def _small() -> object:
    events = [
        Event(rank=r, lane="7", device=True, kind="kernel", name=n, start_ns=s, duration_ns=5, iteration=0)
        for r in range(2)
        for s, n in ((0, "a"), (7, "b"))
    ]
    return from_events(events, marks=(Mark(rank=0, iteration=0, start_ns=0, end_ns=12),))


def test_timeline_round_trip_and_schema(tmp_path: Path) -> None:
    import jsonschema

    t = _small()
    for name in ("t.json", "t.json.gz"):
        save_timeline(t, tmp_path / name, critical=[1])
        back = load_timeline(tmp_path / name)
        assert all(np.array_equal(back[c], t[c]) for c in t.columns)
        assert (back.names, back.lanes, back.marks) == (t.names, t.lanes, t.marks)
    jsonschema.validate(to_json(t), schema())
    whole = json.loads((tmp_path / "t.json").read_text())
    jsonschema.validate(whole, schema())
    # The same file loads in Perfetto: its complete events have numeric times.
    spans = [e for e in whole["traceEvents"] if e["ph"] == "X"]
    assert {"name", "ts", "dur", "pid", "tid"} <= set.intersection(*(set(e) for e in spans))
    assert sum(e.get("cat") == "critical" for e in spans) == 1
    assert len(load(tmp_path / "t.json")) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "pase.timeline/9"}, "pase.timeline/9"),
        ({"names": []}, "column 'name'"),
        ({"columns": {}}, "broken timeline: at columns/lane: is missing"),
        ({"names": [1]}, "at names/0: must be text, got 1"),
        (
            {"lanes": [{"rank": 2**31, "name": "s", "device": True}]},
            r"at lanes/0/rank: must be at most 2.*e\+09",
        ),
        ({"schema": "other"}, "not a pase timeline"),
    ],
)
def test_foreign_timelines_are_refused(change: dict, words: str) -> None:
    with pytest.raises(PaseError, match=words):
        from_json({**to_json(_small()), **change}, "x.json")


def test_chrome_export_puts_ranks_on_one_clock() -> None:
    from dataclasses import replace

    from pase.replay.types import Clock

    t = replace(_small(), clocks=(Clock(rank=0), Clock(rank=1, offset_ns=1000.0)))
    spans = [e for e in chrome_trace(t)["traceEvents"] if e.get("cat") == "kernel"]
    at = {(e["pid"], e["name"]): e["ts"] for e in spans}
    assert at[(1, "a")] - at[(0, "a")] == 1.0


def _without_sizes(document: dict) -> dict:
    for e in document["traceEvents"]:
        for key in ("In msg nelems", "Out msg nelems", "dtype", "Collective name"):
            e["args"].pop(key, None)
    return document


def test_sizes_come_from_annotations_around_the_launch(tmp_path: Path) -> None:
    document = _without_sizes(trace(simulate(ImaginedRun(ranks=1, iterations=2)), 0))
    kernels = {e["args"]["correlation"]: e for e in document["traceEvents"] if "AllReduce" in e["name"]}
    for e in list(document["traceEvents"]):
        if e["cat"] == "cuda_runtime" and e["args"].get("correlation") in kernels:
            kernels[e["args"]["correlation"]]["name"] = (
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
            )
            note = {
                **e,
                "cat": "user_annotation",
                "name": "nccl:all_to_all",
                "ts": e["ts"] - 1,
                "dur": e["dur"] + 2,
            }
            document["traceEvents"].append(
                {**note, "args": {"Input Dims": [[10, 100]], "Input type": ["float"]}}
            )
    (tmp_path / "t.json").write_text(json.dumps(document))
    events = [e for e in load(tmp_path / "t.json") if e.kind == "collective"]
    assert events
    assert {(e.operation, e.nbytes) for e in events} == {("all_to_all", 4000)}


def _execution_trace(sizes: list[int]) -> str:
    nodes = [
        {"id": i, "name": "nccl:all_reduce", "inputs": {"values": [[1, 2, 0, s, 4, "cuda:0"]]}}
        for i, s in enumerate(sizes)
    ]
    return json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": nodes})


def test_sizes_come_from_an_execution_trace(tmp_path: Path) -> None:
    document = _without_sizes(trace(simulate(ImaginedRun(ranks=1, iterations=3)), 0))
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert {e.nbytes for e in load(tmp_path) if e.kind == "collective"} == {-1}
    # There are four buckets per iteration, and the execution trace has two iterations.
    (tmp_path / "et.json").write_text(_execution_trace([1, 2, 3, 4] * 2))
    t = load(tmp_path)
    sizes = [e.nbytes for e in t if e.kind == "collective" and e.iteration == 1]
    assert sizes == [4, 8, 12, 16]
    (tmp_path / "et.json").write_text(_execution_trace([1, 2, 3]))
    assert any("do not match" in str(p) for p in load(tmp_path).problems)
    with pytest.raises(PaseError, match="execution trace") as e:
        load(tmp_path / "et.json")
    assert e.value.where == str(tmp_path / "et.json") and "profiler's trace" in e.value.fix


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
    with pytest.raises(PaseError, match=r"needs ijson: pip install 'ijson"):
        load(_file(tmp_path, [_kernel(1)]))


def test_what_is_said_of_a_damaged_trace_commands_no_terminal(tmp_path: Path) -> None:
    for k, text in enumerate(
        (b'{"traceEvents": [{"ph": "X", \x1b[2J', b"\x1b[2J", b'{"traceEvents": [{"ph": "\x1b[2J"}]}')
    ):
        path = tmp_path / f"rank{k}.json"
        path.write_bytes(text)
        with pytest.raises(PaseError) as refused:
            load(path)
        assert "\x1b" not in str(refused.value)
