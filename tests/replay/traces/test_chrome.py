"""Traces in Chrome's format: kinds of events and devices. Of values that JSON does not allow and faults of profilers,
harmless ones are read, and others are reported."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pase.errors import PaseError
from pase.replay.measurement.clocks import align
from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.ingest import load
from pase.replay.types import KINDS, OPERATIONS, Timeline
from tests.replay.traces.files import kernel, trace_file

pytest.importorskip("ijson")


def trace(**kernel: Any) -> dict[str, Any]:
    """A trace of six steps with eight kernels each. kernel: further arguments of each kernel."""
    events: list[dict[str, Any]] = []
    for step in range(6):
        t = 1000 + step * 1000
        name = f"ProfilerStep#{step}"
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": t, "dur": 995}
        )
        for j in range(8):
            at = {"ph": "X", "pid": 1, "tid": 1}
            number = {"correlation": step * 8 + j + 1}
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": t + 10 + j * 8, "dur": 5}
            events.append(at | launch | {"args": dict(number)})
            run = {"cat": "kernel", "name": f"k{j}", "tid": 7, "ts": t + 90 + j * 105, "dur": 100}
            events.append(at | run | {"args": number | {"stream": 7, "device": 0} | kernel})
    return {"schemaVersion": 1, "traceEvents": events}


def kernels(t: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in t["traceEvents"] if e["cat"] == "kernel"]


def read(tmp_path: Path, data: bytes | dict[str, Any], name: str = "t.json") -> Timeline:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return read_chrome(path)


def told(t: Timeline) -> str:
    return " ".join(map(str, t.problems))


HARMLESS: dict[str, Callable[[], bytes]] = {
    "uint64": lambda: json.dumps(trace(Seq=2**64 - 1)).encode(),
    "far below zero": lambda: json.dumps(trace(low=-(2**70), high=2**63)).encode(),
    "a byte order mark": lambda: b"\xef\xbb\xbf" + json.dumps(trace()).encode(),
    "nested in lists": lambda: json.dumps(trace(dims=[[2**64, 1], [2**65]]), indent=1).encode(),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_harmless(tmp_path: Path, what: str) -> None:
    expected = read(tmp_path, trace())
    found = read(tmp_path, HARMLESS[what]())
    assert not found.problems and len(found) == len(expected) == 102
    for column in ("start_ns", "duration_ns", "correlation", "kind"):
        assert (found[column] == expected[column]).all(), column


def test_numbers_stay_what_they_are(tmp_path: Path) -> None:
    """The largest 64-bit integer and a long fraction are read, and a name with many digits in brackets is unchanged."""
    t = trace(most=2**63 - 1, fraction=0.12345678901234567890123)
    kernels(t)[0]["name"] = "k_[12345678901234567890123, 4]"
    found = read(tmp_path, t)
    assert not found.problems and len(found) == 102


@pytest.mark.parametrize("size", range(1, 60, 7))
def test_numbers_and_characters_across_reads(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on where a read of the file ends."""
    monkeypatch.setattr("pase.replay.traces.reader.BoundedReader.CHUNK", 1000 + size)
    t = trace(Seq=2**64 - 1)
    for e in kernels(t):
        e["name"] = "größer→" + e["name"]
    found = read(tmp_path, json.dumps(t, ensure_ascii=False).encode())
    assert not found.problems and len(found) == 102 and "größer→k3" in found.names


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "NaN", "-Infinity", f"1{'0' * 400}"])
def test_beyond_a_float(tmp_path: Path, number: str) -> None:
    found = read(tmp_path, json.dumps(trace(x="@")).replace('"@"', number).encode())
    assert len(found) == 102
    assert "48 bare NaN or Infinity values" in told(found)


def test_no_utf8(tmp_path: Path) -> None:
    found = read(tmp_path, json.dumps(trace()).replace('"k3"', '"k\xe93"').encode("latin-1"))
    assert len(found) == 102 and "6 bytes that are not UTF-8" in told(found)
    assert "k\ufffd3" in found.names
    with pytest.raises(PaseError, match="UTF-16") as e:
        read(tmp_path, json.dumps(trace()).encode("utf-16"))
    assert e.value.where == str(tmp_path / "t.json") and "iconv" in e.value.fix


def test_numbers_in_strings(tmp_path: Path) -> None:
    t = trace()
    for e in t["traceEvents"]:
        e["ts"], e["dur"] = str(e["ts"]), str(e["dur"])
        if "args" in e:
            e["args"]["correlation"] = str(e["args"]["correlation"])
    found, expected = read(tmp_path, t), read(tmp_path, trace())
    assert not found.problems
    for column in ("start_ns", "duration_ns", "correlation"):
        assert (found[column] == expected[column]).all()


@pytest.mark.parametrize("base", [2**63, 2**64 - 100, 2**61])
def test_correlations_beyond_64_bits(tmp_path: Path, base: int) -> None:
    """Launches and kernels still have distinct correlations that match."""
    t = trace()
    for e in t["traceEvents"]:
        if "args" in e:
            e["args"]["correlation"] += base
    numbers = read(tmp_path, t)["correlation"]
    numbers = numbers[numbers >= 0]
    assert len(numbers) == 96 and len(set(numbers.tolist())) == 48


def test_times_that_are_none(tmp_path: Path) -> None:
    t = trace()
    broken = kernels(t)
    broken[0]["dur"] = -5
    broken[1]["dur"] = None
    broken[2]["ts"] = 2**64
    del broken[3]["dur"]
    broken[4]["name"] = None
    broken[5]["args"] = None
    found = read(tmp_path, t)
    assert len(found) == 99
    for what in (
        "2 events with a negative or absurd time or duration, left out",
        "1 events whose time is not a finite number, left out",
        "1 complete events without a duration, read as instants",
    ):
        assert what in told(found)


def test_an_op_that_outlasts_the_next(tmp_path: Path) -> None:
    """A kernel with a wrong end (ROCm) is ended where the next one of its stream begins, and this is reported."""
    t = trace()
    for e in kernels(t):
        if e["name"] == "k2":
            e["dur"] = 560
    found = read(tmp_path, t)
    assert "6 ops outlast the next op" in told(found) and "'k2' on stream 7" in told(found)
    k2 = found["name"] == found.names.index("k2")
    assert set(found["duration_ns"][k2].tolist()) == {105_000}


@pytest.mark.parametrize("why", ["a graph's", "of another stream", "a little longer"])
def test_ops_that_may_overlap(tmp_path: Path, why: str) -> None:
    t = trace()
    for e in kernels(t):
        if why == "a graph's":
            e["args"]["correlation"] -= (e["args"]["correlation"] - 1) % 8
        if e["name"] == "k2":
            e["dur"] = 110 if why == "a little longer" else 560
            if why == "of another stream":
                e["args"]["stream"] = 8
    found = read(tmp_path, t)
    assert not found.problems
    assert found["duration_ns"][found["name"] == found.names.index("k2")].min() > 105_000


def test_packed(tmp_path: Path) -> None:
    data = json.dumps(trace(Seq=2**64 - 1)).encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(data))
    with zipfile.ZipFile(tmp_path / "b.json.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("folder/t.json", data)
    for name in ("a.json.gz", "b.json.zip"):
        assert len(load(tmp_path / name)) == 102
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as z:
        z.writestr("a.json", data)
        z.writestr("b.json", data)
    with pytest.raises(PaseError, match=r"2 \.json files") as e:
        load(tmp_path / "two.zip")
    assert e.value.where == str(tmp_path / "two.zip") and "folder" in e.value.fix


def test_a_bomb_in_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.json.zip", "w", zipfile.ZIP_DEFLATED) as z, z.open("t.json", "w") as f:
        for _ in range(80):
            f.write(b" " * (1 << 20))
    with pytest.raises(PaseError, match="zip bomb") as e:
        load(tmp_path / "t.json.zip")
    assert e.value.where == str(tmp_path / "t.json.zip")


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", "runtime"),
        ("xpu_driver", "zeCommandListAppendLaunchKernel", "runtime"),
        ("privateuse1_runtime", "launch", "runtime"),
        ("mtia_ccp_events", "fc-dtype_Float", "kernel"),
        ("mtia_ccp_events", "dma_request", "memcpy"),
        ("mtia_ccp_events", "event_wait", "annotation"),
        ("Kernel", "sgemm", "kernel"),
        ("Memcpy", "Memcpy HtoD (Pageable -> Device)", "memcpy"),
        ("Runtime", "cudaLaunchKernel", "runtime"),
        ("Operator", "aten::add", "host"),
        ("Operator", "ProfilerStep#16", "annotation"),
    ],
)
def test_other_devices_and_older_traces(tmp_path: Path, category: str, name: str, kind: str) -> None:
    """MTIA's queue records computing, copying and waiting. Each kind of device has its own driver calls. PyTorch 1.8
    and 1.9 wrote other categories."""
    args = {"stream": 7, "correlation": 3, "size" if "mtia" in category else "bytes": 1852}
    e = next(iter(load(trace_file(tmp_path, [kernel(0, cat=category, name=name, args=args)]))))
    assert e.kind == kind
    if kind == "memcpy":
        assert e.nbytes == 1852


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
    t = load(trace_file(tmp_path, [kernel(0, name=name)]))
    assert (KINDS[t["kind"][0]], OPERATIONS[t["operation"][0]]) == ("collective", operation)


def test_times_keep_nanoseconds_at_unix_epoch(tmp_path: Path) -> None:
    """Times count from the first event: a float holds no time since 1970 to less than 256 ns."""
    a, b = kernel(0, ts=1669783687464181, dur=1.5), kernel(0, ts=1669783687464183.25, dur=1)
    t = align(load(trace_file(tmp_path, [a, b])))
    assert t["start_ns"].tolist() == t.global_start_ns().tolist() == [0, 2250]
    assert t["duration_ns"].tolist() == [1500, 1000]


def test_nan_and_infinity_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    good = json.dumps(kernel(1))
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
        trace_file(tmp_path, [kernel(1), kernel(2, dur=-4), kernel(3, ts=1e300), 7, None, kernel(4, ts="x")])
    )
    assert len(t) == 1
    text = " ".join(map(str, t.problems))
    assert "2 events with a negative or absurd time" in text
    assert "2 entries that are not events" in text


def test_begin_and_end_events_are_paired(tmp_path: Path) -> None:
    events = [
        {"ph": p, "name": "f", "pid": 1, "tid": 1, "ts": ts}
        for p, ts in (("B", 1), ("B", 2), ("E", 5), ("E", 9))
    ]
    t = load(trace_file(tmp_path, events))
    assert sorted(
        zip((t["start_ns"] // 1000).tolist(), (t["duration_ns"] // 1000).tolist(), strict=True)
    ) == [(0, 8), (1, 3)]
