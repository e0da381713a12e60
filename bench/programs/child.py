"""Runs one program in its own process: plans it, runs it sharded and unsharded, and compares it with XLA."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

What = Literal["step", "float64", "count"]
"""What a process does: measure a row, run the same step in float64, or only count the row's FLOPs."""
PRELOADED = ("jax", "optax", "bench.cases.plans", "pase.backends.audit.xla", "pase.backends.audit.xla_memory")
"""Packages that every program needs; they are imported once for all processes."""

STRATEGY = "ours@2x4"
"""Compute is made expensive, so that everything that can be split is split over a mesh of 2 x 4."""


def recount(name: str) -> dict[str, Any]:
    """Counts the FLOPs of a program's row again, after the counting has changed."""
    from bench.cases.plans import case_of
    from bench.programs.catalog import load

    fn, *args = load()[name]()
    return flops(fn, args, case_of(fn, *args, name=name).problem.graph)


def main(name: str) -> dict[str, Any]:
    """Returns a program's row. planned, ran, agrees: how far the program came. off: relative differences from the
    unsharded step. flops, memory: predicted value over XLA's."""
    import optax

    from bench.cases.plans import TOLERANCE, case_of
    from bench.programs.catalog import load
    from pase.backends.audit.xla import sharded_step, unsharded_step
    from pase.backends.audit.xla_memory import compare_memory

    row: dict[str, Any] = {"planned": False, "ran": False, "agrees": False}
    try:
        row["stage"] = "made"
        fn, *args = load()[name]()
        row["stage"] = "planned"
        begin = time.process_time()
        case = case_of(fn, *args, name=name)
        row["nodes"] = len(case.problem.graph.nodes)
        plan = case.plan(STRATEGY)
        assert plan is not None
        row |= {
            "planned": True,
            "seconds": round(time.process_time() - begin, 2),
            "notes": list(plan.remarks),
        }
        row["collectives"] = len(plan.collectives)
        row["stage"] = "ran"
        optimizer = optax.adam(1e-2, eps=1e-3)
        sharded = sharded_step(plan, optimizer, *args)
        row["ran"], row["stage"] = True, "agrees"
        whole = unsharded_step(fn, optimizer, *args)
        row["off"] = whole.differences(sharded)
        row["agrees"] = all(v <= TOLERANCE[k] for k, v in row["off"].items())
        row["stage"] = "compared"
        row |= flops(fn, args, case.problem.graph)
        peak = compare_memory(plan, sharded.compiled, sharded.lowering)
        row |= {"memory": peak.on_cpu / peak.compiled, "stage": "done"}
    except Exception as e:
        row["error"] = f"{type(e).__name__}: {e}"[:1000]
    return row


def in_float64(name: str) -> dict[str, Any]:
    """Runs a program that disagrees in float32 in float64. Returns ``off`` in float64, and ``rounding``: the difference
    of the unsharded steps in float32 and float64. ``explained``: the plan is right in float64, and the difference in
    float32 is within rounding."""
    import jax
    import optax

    from bench.cases.plans import TOLERANCE, case_of
    from bench.programs.catalog import load
    from pase.backends.audit.xla import sharded_step, unsharded_step

    fn, *narrow = load()[name]()  # made in float32, so that both start with the same numbers
    jax.config.update("jax_enable_x64", True)
    fn_wide = fn
    if keras := sys.modules.get(
        "keras"
    ):  # its layers compute in their own dtype, and its norms never in float64
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        sys.modules["keras.src.backend.common.dtypes"].BIT64_TO_BIT32_DTYPE.pop("float64")
        fn_wide, *_ = load()[name]()

    def widened(x: Any) -> Any:
        return x.astype("float64") if getattr(x, "dtype", None) == "float32" else x

    wide, optimizer = jax.tree.map(widened, narrow), optax.adam(1e-2, eps=1e-3)
    plan = case_of(fn_wide, *wide, name=name).plan(STRATEGY)
    assert plan is not None
    whole = unsharded_step(fn_wide, optimizer, *wide)
    off = whole.differences(sharded_step(plan, optimizer, *wide))
    with jax.enable_x64(False):  # otherwise arrays that the program creates itself would be float64
        rounding = whole.differences(unsharded_step(fn, optimizer, *narrow))
    right = all(v <= TOLERANCE[k] for k, v in off.items())
    blurred = any(v > TOLERANCE[k] for k, v in rounding.items())
    return {"off": off, "rounding": rounding, "explained": right and blurred}


def flops(fn: Any, args: Any, graph: Any) -> dict[str, float]:
    """Returns our FLOPs of loss and gradients over XLA's, counted as XLA does: the body of a loop once, one FLOP for
    any elementwise function, and functions like exp separately (``transcendentals``)."""
    import jax
    import numpy as np

    from pase.frontends.jax.leaves import arrays, combine, static, value_and_grad
    from pase.machine import mesh_from
    from pase.tables.work import node_work

    mesh = mesh_from("1", 1)
    counted = as_xla_counts(graph)
    ours = 0.0
    for n in counted.nodes:
        for w in node_work(counted, n, np.full((1, 1), -1, np.int8), mesh):
            ours += float(w.flops[0]) * (w.times if w.phase != "update" else 0.0)
    fixed = static(tuple(args))
    graded = jax.jit(lambda *given: jax.tree.leaves(value_and_grad(fn)(*combine(given, fixed))))
    cost = graded.lower(*arrays(tuple(args))).cost_analysis()
    return {
        "flops": ours / max(cost.get("flops", 0.0), 1.0),
        "flops_xla": cost.get("flops", 0.0),
        "transcendentals": cost.get("transcendentals", 0.0),
    }


def as_xla_counts(graph: Any) -> Any:
    """Returns the graph with loops of one iteration, and with XLA's FLOPs per point."""
    from dataclasses import replace

    def counted(op: Any) -> Any:
        apart = op.kind == "elementwise" and op.function.flops >= 10.0
        point = (
            0.0 if apart else min(op.flops_per_point, 1.0) if op.kind == "elementwise" else op.flops_per_point
        )
        return replace(op, times=1, flops_per_point=point)

    return replace(graph, nodes=tuple(replace(n, ops=tuple(map(counted, n.ops))) for n in graph.nodes))


ROWS: dict[What, Callable[[str], dict[str, Any]]] = {"step": main, "float64": in_float64, "count": recount}
"""What a process does -> the function that returns the row."""
