"""Ops of several programs of one run, which have the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pase.replay.traces.ingest import load
from pase.replay.traces.launches import Kernels, graph_kernel, named
from pase.replay.traces.programs import of_program, program_of, told_apart
from pase.replay.types import CompiledOp, Event, Timeline, from_events
from tests.replay.traces.files import trace_file
from tests.replay.traces.test_launches import facts

GRAD, UPDATE = "jit_grad(3)", "jit_update(5)"


def ran(*names: str) -> Timeline:
    return from_events(
        [
            Event(rank=0, lane="s", device=True, kind="kernel", name=n, start_ns=10 * k, duration_ns=5)
            for k, n in enumerate(names)
        ]
    )


def test_the_main_program_keeps_names_and_each_op_has_its_own_facts() -> None:
    t = ran(
        of_program("copy.1", UPDATE), of_program("copy.1", GRAD), of_program("attention.2", UPDATE), "Memset"
    )
    other = facts(["copy.1", "attention.2", "copy.7"])
    other = replace(
        other, ops={**other.ops, "copy.1": CompiledOp(part="update", operands=(), work="norm")}, kinds={}
    )
    kernels = {of_program("copy.1", UPDATE): "slow", of_program("copy.1", GRAD): "fast"}
    t, found, longest = told_apart(t, {GRAD: facts(["copy.1"]), UPDATE: other}, GRAD, kernels)
    assert [e.name for e in t] == ["copy.1 (jit_update)", "copy.1", "attention.2", "Memset"]
    assert found is not None and found.order == ("copy.1",)
    assert {n: op.work for n, op in found.ops.items()} == {
        "copy.1": "copy",
        "copy.1 (jit_update)": "norm",
        "attention.2": "attention",
    }
    assert longest == {"copy.1 (jit_update)": "slow", "copy.1": "fast"}


def test_programs_of_one_name_are_told_apart_by_number() -> None:
    t = ran(*(of_program("copy.1", f"jit_step({k})") for k in (1, 2, 3)))
    t, found, _ = told_apart(t, {}, "jit_step(1)", {})
    assert [e.name for e in t] == ["copy.1", "copy.1 (jit_step(2))", "copy.1 (jit_step(3))"]
    assert found is None


def test_a_chrome_trace_tells_programs_apart(tmp_path: Path) -> None:
    """Two programs in turns, whose ops have the same names."""
    events = [
        {
            "ph": "X",
            "name": "k",
            "pid": 1,
            "tid": 1,
            "ts": 10.0 * (2 * step + place),
            "dur": 5.0 + place,
            "args": {
                "hlo_op": "fusion.3",
                "hlo_module": name,
                "run_id": f"{step}{place}",
                "device_ordinal": 0,
            },
        }
        for step in range(3)
        for place, name in enumerate(("jit_grad", "jit_update"))
    ]
    t = load(trace_file(tmp_path, events))
    assert [e.name for e in t] == ["fusion.3 (jit_grad)", "fusion.3"] * 3
    assert [(m.start_ns, m.end_ns) for m in t.marks] == [(20_000 * k, 20_000 * k + 16_000) for k in range(3)]


def test_an_op_of_the_main_program_that_did_not_run_lends_its_facts_to_no_other() -> None:
    t, found, _ = told_apart(ran(of_program("copy.1", UPDATE)), {GRAD: facts(["copy.1"])}, GRAD, {})
    assert found is not None and t.names[0] not in found.ops


def test_kernels_of_a_graph_are_aligned_with_their_own_program() -> None:
    """Without the update's program, its kernels get no op of the gradient, though one would fit."""
    t = ran(
        of_program(graph_kernel("nvjet_sm90_tst_128x128"), GRAD),
        of_program(graph_kernel("nvjet_sm90_tst_128x128"), UPDATE),
    )
    launched = facts(["custom-call.1", "custom-call.2"])
    t, _, _ = told_apart(named(t, {GRAD: launched}, Kernels()), {GRAD: launched}, GRAD, {})
    assert [e.name for e in t] == ["custom-call.1", "nvjet_sm90_tst_128x128"]


def test_a_long_name_that_is_cut_keeps_its_program() -> None:
    """Kernels of cuDNN have names of more than 400 characters."""
    assert program_of(of_program("k" * 500, GRAD)[:400])[1] == GRAD
