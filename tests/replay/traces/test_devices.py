"""Traces of devices other than CUDA's and of older PyTorch, and of a device that lags behind when the trace begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pase.errors import PaseError
from pase.replay import align, measure
from pase.replay.traces.ingest import load
from pase.replay.types import KINDS
from tests.replay.traces.test_ingest import _file, _kernel


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
    e = next(iter(load(_file(tmp_path, [_kernel(0, cat=category, name=name, args=args)]))))
    assert e.kind == kind
    if kind == "memcpy":
        assert e.nbytes == 1852


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
        _kernel(0, cat="cuda_runtime", name="cudaLaunchKernel", pid=1, tid=1, ts=10 + 25 * i, dur=2)
        | {"args": {"correlation": 1000 + i}}
        for i in range(12)
    ]
    ops = [
        _kernel(i % 4, ts=20 + 25 * k, dur=25, args={"stream": 7, "correlation": 1000 + i})
        for k, i in enumerate(range(-before, 12))
    ]
    return [*step, *calls, *ops]


def test_ops_launched_before_the_trace_are_in_no_iteration(tmp_path: Path) -> None:
    t = load(_file(tmp_path, _lagging(before=6)))
    on_device = t["kind"] == KINDS.index("kernel")
    number = t["iteration"][on_device][np.argsort(t["start_ns"][on_device])]
    assert number.tolist() == [-1] * 6 + [0] * 4 + [1] * 4 + [2] * 4


def test_a_trace_without_device_ops_says_what_to_record(tmp_path: Path) -> None:
    call = _kernel(0, cat="cpu_op", name="aten::add")
    with pytest.raises(PaseError, match="no device op") as e:
        measure(align(load(_file(tmp_path, [call]))))
    assert "CUDA, XPU or MTIA" in e.value.fix
