"""The ops of a compiled program that the kernels of a CUDA graph run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.replay.traces.hlo import HloFacts
from pase.replay.traces.ingest import load
from pase.replay.traces.launches import Kernels, align_kernels, graph_kernel, named
from pase.replay.types import CompiledOp, Event, from_events, on_stream
from tests.needs import SHARED

WORK = {"loop_add_fusion": "elementwise", "custom-call": "product", "copy": "copy", "attention": "attention"}
KERNEL = {"custom-call": "nvjet_sm90_tst_128x128", "copy": "memcpy128", "attention": "cudnn_sdpa_flash_fprop"}


def facts(launched: list[str]) -> HloFacts:
    ops = {n: CompiledOp(part="forward", operands=(), work=WORK[n.partition(".")[0]]) for n in launched}
    return HloFacts(
        module="m",
        order=tuple(launched),
        reads={},
        kinds={},
        nbytes={},
        groups={},
        asynchronous=frozenset(),
        ops=ops,
        launched=tuple(launched),
    )


def kernels_of(launched: list[str]) -> tuple[list[str], list[str]]:
    """Returns the kernels of ops, and the op of each. Equal fusions share a kernel; products clear their output."""
    out: list[tuple[str, str]] = []
    for op in launched:
        base = op.partition(".")[0]
        if base == "custom-call":
            out.append(("Memset 0", op))
        out.append((KERNEL.get(base, "loop_add_fusion_1"), op))
    return [k for k, _ in out], [op for _, op in out]


@given(st.lists(st.sampled_from(sorted(WORK)), min_size=1, max_size=60))
def test_each_kernel_runs_the_op_at_its_place(kinds: list[str]) -> None:
    launched = [f"{k}.{i}" for i, k in enumerate(kinds)]
    kernels, ops = kernels_of(launched)
    assert align_kernels(kernels, facts(launched)) == ops


@given(st.data())
def test_an_op_that_the_profiler_recorded_keeps_its_name(data: st.DataObject) -> None:
    """Ops that do not depend on each other run in any order; equal fusions would fit each other's places."""
    launched = [f"loop_add_fusion.{i}" for i in range(8)]
    ran = data.draw(st.permutations(launched))
    events = [
        Event(rank=0, lane="XLA ops", device=True, kind="kernel", name=n, start_ns=k, duration_ns=1)
        for k, n in enumerate([*ran, graph_kernel("nvjet_sm90_tst_128x128")])
    ]
    t = named(from_events(events), {"": facts([*launched, "custom-call.9"])}, Kernels())
    assert [e.name for e in t] == [*ran, "custom-call.9"]
    assert [e.name for e in named(from_events(events), {}, Kernels())][-1] == "nvjet_sm90_tst_128x128"


def test_an_op_without_a_kernel_is_passed_over() -> None:
    launched = ["loop_add_fusion.1", "custom-call.2", "copy.3", "attention.4"]
    kernels, ops = kernels_of(["loop_add_fusion.1", "custom-call.2", "attention.4"])
    assert align_kernels(kernels, facts(launched)) == ops


def test_a_long_program_is_aligned_in_blocks() -> None:
    launched = [f"{('loop_add_fusion', 'custom-call', 'attention')[i % 3]}.{i}" for i in range(5000)]
    kernels, ops = kernels_of(launched)
    assert align_kernels(kernels, facts(launched)) == ops


def test_an_unknown_kernel_keeps_its_name() -> None:
    assert align_kernels(["something"], facts(["loop_add_fusion.1"])) == [""]


@pytest.mark.some(3)
@pytest.mark.data("gpu_h100/traces")
@pytest.mark.parametrize("path", sorted((SHARED / "gpu_h100/traces").glob("*.gz")), ids=lambda p: p.name[:9])
def test_device_time_of_real_profiles_has_the_users_names(path: Path) -> None:
    t = load(path)
    device = np.flatnonzero(on_stream(t["kind"]))
    length = t["duration_ns"][device]
    known = np.array([bool(n in t.compiled and t.compiled[n].op_name) for n in t.names], dtype=bool)
    assert length[known[t["name"][device]]].sum() > 0.99 * length.sum()
    assert all("H100" in d for d in t.devices.values()) and t.devices
