"""compile, load, compare: the way through, from a model to a Plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pase.compiler.resolve import resolve, traced_model
from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.baselines import Baseline
    from pase.compiler.problem import Problem, Progress
    from pase.compiler.variants import Remat
    from pase.frontends.registry import Traced
    from pase.machine import Machine
    from pase.plan.types import Plan

__all__ = ["compare", "compile", "load", "resolve"]


def compile(
    model: Any,
    params: Any = None,
    *batch: Any,
    devices: int,
    mesh: str | None = None,
    machine: str | Path | Machine | None = None,
    cost_model: str = "analytic",
    optimizer: str = "adam",
    unknown: Literal["error", "replicate"] = "error",
    dims: Mapping[str, int] | None = None,
    max_axes: int = 3,
    baselines: bool = True,
    memory_limit: float | None = None,
    accumulate: int | None = None,
    remat: Remat = "auto",
    overlap: Literal["none", "gradients"] = "none",
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    """Find the best split of every layer over ``devices``, over all meshes, and say what follows from it.

    model: "zoo:NAME?batch=…", "package.module:function" (which returns loss_fn, params, *batch), a JAX
        callable ``loss_fn(params, *batch) -> scalar`` followed by its example arguments (shapes suffice), or what
        another frontend reads: "model.onnx", an onnx.ModelProto, …
    mesh: "4x8" or "data=4,model=8" fixes the mesh; else every mesh of at most ``max_axes`` axes is searched.
    machine: a name (``pase machines``), a TOML file, or a Machine.
    optimizer: whose state is counted and whose update is priced: see ``pase.tables.derive.OPTIMIZERS``.
    unknown: what to do at an op without a rule: "error", or "replicate" (it may not be split).
    dims: integers for the model's symbolic sizes, {"batch": 64}, and for the turns of while loops, {"while0": 100}.
    baselines: also price data parallelism, FSDP, Megatron, … ; the answer is then never worse than any of them.
    memory_limit: bytes a device may hold; the search then finds the cheapest strategy whose predicted memory
        fits, or raises Infeasible. None: memory is reported, and does not constrain.
    accumulate: micro-batches of a step, over which gradients are summed; the loss must be a mean over the batch.
        None: 1, or as many as the memory limit asks for.
    remat: compute repeated blocks (a loop's body, equal layers) again in backward: "all" of them, "none" but those that
        the model itself marks, or "auto": as the memory limit asks for.
    overlap: "gradients" prices of their synchronisation only what backward's compute cannot hide (see
        ``pase.compiler.overlap``), as machines with asynchronous collectives have it.
    time_limit: seconds for the searches under a memory limit, which need not be exact; the plan says so.
    progress: called with a line of text at each step of the way.

    Raises PaseError for bad input; Infeasible where no strategy exists.
    """
    return _compiled(
        model, params, *batch, devices=devices, mesh=mesh, machine=machine, cost_model=cost_model, optimizer=optimizer,
        unknown=unknown, dims=dims, max_axes=max_axes, baselines=baselines, memory_limit=memory_limit,
        accumulate=accumulate, remat=remat, overlap=overlap, time_limit=time_limit, progress=progress,
    ).plan  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """A plan, and what it was made of."""

    plan: Plan
    problem: Problem
    traced: Traced
    given: tuple[Baseline, ...]


def _compiled(
    model: Any,
    params: Any = None,
    *batch: Any,
    devices: int,
    mesh: str | None = None,
    machine: str | Path | Machine | None = None,
    cost_model: str = "analytic",
    optimizer: str = "adam",
    unknown: Literal["error", "replicate"] = "error",
    dims: Mapping[str, int] | None = None,
    max_axes: int = 3,
    baselines: bool = True,
    memory_limit: float | None = None,
    accumulate: int | None = None,
    remat: Remat = "auto",
    overlap: Literal["none", "gradients"] = "none",
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> _Compiled:
    """What ``compile`` does."""
    from pase.compiler.fit import fitted
    from pase.compiler.overlap import OVERLAP
    from pase.compiler.problem import Problem
    from pase.compiler.variants import Variant, variants
    from pase.tables.derive import OPTIMIZERS

    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise PaseError(f"devices must be a positive whole number, got {devices!r}")
    if optimizer not in OPTIMIZERS:
        raise PaseError(f"no optimizer '{optimizer}'; known: {', '.join(OPTIMIZERS)}")
    if unknown not in ("error", "replicate"):
        raise PaseError(f"unknown is 'error' or 'replicate', not {unknown!r}")
    if overlap not in OVERLAP:
        raise PaseError(f"overlap is 'none' or 'gradients', not {overlap!r}")
    say = progress or (lambda _: None)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = traced_model(model, params, batch, unknown, dims)
    problem = replace(Problem.of(traced.graph, devices, machine, cost_model, optimizer), overlap=overlap)
    tries = list(variants(traced, problem.graph, accumulate, remat, memory_limit is not None))
    if tries[0][0] != Variant():
        problem = problem.varied(traced, tries[0][0])
    seconds = {"trace": time.perf_counter() - start}
    over = problem.meshes(mesh, max_axes)
    found = problem.search(over, say, seconds)
    if memory_limit is not None:
        problem, found = fitted(
            problem, found, tries, traced, over, float(memory_limit), time_limit, say, seconds
        )
    if baselines:
        say("pricing what people do by hand")
        t0 = time.perf_counter()
        given, skipped = problem.baselines()
        found = problem.never_worse(found, given, memory_limit)
        seconds["baselines"] = time.perf_counter() - t0
        # A method's mesh may be one that was not among ours: it is searched too.
        if mesh is None and memory_limit is None:
            known = {m.sizes for m in over}
            more = [b.mesh for b in given if b.mesh.sizes not in known and b.cost < found.solution.cost]
            found = problem.search(more, say, seconds, found) if more else found
    else:
        given, skipped = [], []
    seconds["total"] = time.perf_counter() - start
    plan = problem.plan(found, name, traced, seconds, given, skipped)
    return _Compiled(plan=plan, problem=problem, traced=traced, given=tuple(given))


def compare(
    model: Any,
    params: Any = None,
    *batch: Any,
    devices: int,
    progress: Progress | None = None,
    **options: Any,
) -> list[tuple[str, Plan]]:
    """Every method that applies and ours ("pase"), as plans priced alike, cheapest first.

    Arguments as for ``compile``, whose ``baselines`` and ``unknown`` are among the options.
    """
    c = _compiled(model, params, *batch, devices=devices, progress=progress, **options)
    given = c.given or c.problem.baselines()[0]
    out = [("pase", c.plan)]
    out += [(b.name, c.problem.plan_of(b.strategy, b.mesh, c.plan.model, c.traced)) for b in given]
    return sorted(out, key=lambda pair: (pair[1].cost, pair[0] != "pase"))


def load(path: str | Path) -> Plan:
    """Read a layout.json. PaseError where it is corrupt, cut off, or of another version."""
    from pase.plan.layout import load as load_layout

    return load_layout(path)
