"""Sizes of collectives from annotations and execution traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate, trace
from pase.errors import PaseError
from pase.replay.traces.ingest import load


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
