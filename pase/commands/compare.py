"""``pase compare``: compares expert strategies with the one that pase finds, priced by the same cost model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.compile import rates
from pase.commands.options import (
    JsonOption,
    LayoutOutput,
    ModelName,
    StrictOption,
    compile_options,
    print_json,
    progress,
    strictly,
    warn_misfit,
)
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.files.terminal import UNWRAPPED, console
from pase.machine import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pase.compiler.problem.problem import Progress
    from pase.plan.types import PlanData
    from pase.questions.sensitivity import Point
    from pase.stated.price import Priced

    Rows = Sequence[tuple[str, PlanData]]

__all__ = ["compare"]

PURPOSE = "Plan"


@compile_options(of_layout=True)
def compare(
    model: ModelName,
    options: CompileOptions,
    layout: str | None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="Test whether the strategy stays the best if the machine file is wrong. Multiplies bandwidth, "
            "latency, flops or memory (its bandwidth) by factors: bandwidth=0.5..2, bandwidth=0.5..2:9, "
            "flops=0.8,1.2. If given several times, all combinations are tried.",
        ),
    ] = None,
    take: Annotated[
        str | None,
        typer.Option(
            "--take",
            help="Write the plan of this strategy, by its name in the table, to the file of --output. It runs and is "
            "emitted as a plan of 'pase compile' does.",
            metavar="NAME",
        ),
    ] = None,
    output: LayoutOutput = None,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Compare expert strategies with the best one that pase finds.

    The expert strategies are data parallelism, ZeRO, FSDP, one weird trick, and Megatron at every degree. The row
    'pase' is the best strategy that fits the memory limit. Takes every option of 'pase compile'. With --pipeline, a
    line has tensor, pipeline and data parallelism as people run it with Megatron, at usual degrees.

    Prints one line for each strategy: mesh, step time, MFU, compute, exposed communication (that compute does not
    hide), bytes sent and memory. Strategies that do not fit in memory are listed and marked.

    Each strategy is on the same graph. The same exact search tunes it as far as the strategy allows, and the same cost
    model prices it. The figures are predictions, not measurements. 'pase' is never worse than another that fits.

    \b
    Examples:
      pase compare zoo:gpt2 --devices 32
      pase compare layout.json     its model, devices and machine; its own plan is a row too
      pase compare zoo:gpt2 --devices 32 --vary bandwidth=0.5..2
      pase compare zoo:gpt2 --devices 32 --take fsdp -o layout.json
    """
    if (take is None) != (output is None):
        raise PaseError(
            "one of --take and --output is missing",
            where="pase compare",
            fix="write --take fsdp -o layout.json",
        )
    if vary and take is not None:
        raise PaseError(
            "--vary compares costs and has no plans to take", where="--take", fix="leave out one of the two"
        )
    if vary:
        from pase.questions.sensitivity import vary_machine

        with progress() as say:
            points = vary_machine(model, None, (), options, vary, say)
        if json:
            print_json(_varied(points, model, options))
        else:
            _print_varied(points, model, options)
        return
    from pase.compiler.compilation import compare_model
    from pase.plan.layout import save

    with progress() as say:
        rows: Rows = compare_model(model, None, (), options, say)
    if take is not None and output is not None:
        save(_taken(rows, take), output)
    ours = next(plan for name, plan in rows if name == "pase")
    usual = None
    if options.pipeline != "none":
        with progress() as say:
            usual = _usual(model, options, say)
    if layout is not None:
        rows = _with_layout(rows, ours, layout)
    if json:
        print_json({**_comparison(ours, rows), "megatron": None if usual is None else usual.to_json()})
        warn_misfit(ours)
    else:
        _print(ours, rows)
        if options.pipeline != "none":
            _print_usual(usual)
    if output is not None:
        console(err=True).print(f"wrote {output}: {take}")
    strictly(ours.sound, strict)


def _taken(rows: Rows, name: str) -> PlanData:
    plans = dict(rows)
    if name not in plans:
        raise PaseError(
            f"no strategy here is called '{name}'", where="--take", fix=f"take one of {', '.join(plans)}"
        )
    return plans[name]


def _usual(model: str, options: CompileOptions, say: Progress) -> Priced | None:
    """TP·PP·DP as Megatron runs it, for a comparison of pipelines."""
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.resolve import traced_model
    from pase.stated.program import PROGRAMS
    from pase.stated.usual import usual_pipeline

    traced, _ = traced_model(model, None, (), options)
    problem = SplitProblem.of(
        traced.graph, options.devices, options.machine, options.cost_model, options.optimizer
    )
    return usual_pipeline(problem, traced, say, PROGRAMS["megatron"])


def _print_usual(p: Priced | None) -> None:
    from pase.plan.table import bytes_text, cost_text
    from pase.stated.usual import NONE

    if p is None:
        console().print(f"as Megatron runs it: {NONE}")
        return
    fits = "" if p.fits else ", does not fit"
    console().print(
        f"as Megatron runs it: {p.strategy}: {cost_text(p.step_s, 's')}, MFU {p.throughput.mfu:.1%}, "
        f"{bytes_text(p.memory.total)}{fits}; with the work of its own kernels, which the rows above do not have (pase "
        f"price --executor megatron --as {p.strategy})"
    )


def _with_layout(rows: Rows, ours: PlanData, layout: str) -> Rows:
    """The rows with the layout's own plan, as it was priced when it was written. Raises PaseError if its model has
    changed."""
    from pase.plan.layout import load

    plan = load(layout)
    if plan.graph_digest != ours.graph_digest and not (plan.padding or ours.padding):
        raise PaseError(
            f"its model '{plan.model}' has changed since it was written", where=layout, fix="compile it again"
        )
    if (plan.devices, plan.machine, plan.unit) != (ours.devices, ours.machine, ours.unit):
        return rows
    return sorted([*rows, (layout, plan)], key=lambda row: (row[1].cost, row[0] != "pase"))


def _sent_bytes(p: PlanData) -> float:
    """Bytes that a device sends per step."""
    return sum(c.nbytes * c.times for c in p.collectives)


def _comparison(ours: PlanData, rows: Rows) -> dict[str, object]:
    """The object that --json prints."""
    equals = recommended(rows)
    strategies = [
        {
            "name": name,
            "equal_to_best": name in equals,
            "mesh": p.mesh.by_name,
            "cost_s": p.cost if p.unit == "s" else None,
            "cost": p.cost,
            "compute": p.compute,
            "communication": p.communication,
            "exposed": p.exposed,
            **rates(p),
            "memory_bytes": p.memory.total,
            "fits": p.fits,
            "remarks": [r.to_json() for r in p.noted if r not in ours.noted],
            "comm_bytes": _sent_bytes(p),
        }
        for name, p in rows
    ]
    return {
        "model": ours.model,
        "devices": ours.devices,
        "idle": ours.idle,
        "machine": ours.machine,
        "unit": ours.unit,
        "remarks": [r.to_json() for r in ours.noted],
        "recommended": equals[0] if equals else None,
        "strategies": strategies,
        "skipped": dict(ours.skipped),
        "memory_limit_bytes": ours.memory_limit,
        "misfit": ours.misfit,
    }


def recommended(rows: Rows) -> list[str]:
    """The strategies of which it is unknown whether another is faster, the simplest first; only such that fit.

    An expert strategy is simpler than one that was searched, and among those, fewer ways to split a node are. A
    strategy is left out if a simpler one costs less, even if that one is known to be slower than the best: prices of
    similar strategies are off together, so a small difference between them can be certain.
    """
    from pase.plan.error_bar import alike

    def effort(name: str, p: PlanData) -> tuple[bool, int]:
        ways = {tuple(sorted(n.split.items())) for n in p.nodes}
        return name == "pase" or name.endswith(".json"), len(ways)

    fitting = sorted(
        ((effort(name, p), p.cost, name, p) for name, p in rows if p.fits), key=lambda row: row[:2]
    )
    if not fitting:
        return []
    best = min(fitting, key=lambda row: row[1])[-1]
    out, least = [], math.inf  # the least price among those that are as simple or simpler
    for _, cost, name, p in fitting:
        if cost <= least and alike(p, best):
            out.append(name)
        least = min(least, cost)
    return out


_SPARED = ("sends", "exposed", "compute")
"""Columns that are left out on a narrow terminal, in this order."""


def _table(ours: PlanData, rows: Rows, without: Sequence[str]) -> Table:
    from pase.plan.columns import columns
    from pase.plan.table import bytes_text, cost_text

    listed: dict[str, list[str]] = {
        "strategy": [name for name, _ in rows],
        "mesh": ["×".join(map(str, p.mesh.sizes)) for _, p in rows],
        "step": [cost_text(p.cost, p.unit) for _, p in rows],
        "to ours": [f"×{p.cost / ours.cost:.3f}" if ours.cost else "" for _, p in rows],
        "MFU": [f"{p.throughput.mfu:.1%}" if p.throughput is not None else "" for _, p in rows],
        "compute": [cost_text(p.compute, p.unit) for _, p in rows],
        "exposed": [cost_text(p.exposed, p.unit) for _, p in rows],
        "sends": [bytes_text(_sent_bytes(p)) for _, p in rows],
        "memory": [bytes_text(p.memory.total) for _, p in rows],
        "fits": ["yes" if p.fits else "NO" for _, p in rows],
    }
    kept = [name for name in listed if name not in without]
    out = columns(*kept, left=("strategy", "mesh", "fits"))
    for i, (name, _) in enumerate(rows):
        out.add_row(*(listed[k][i] for k in kept), style="bold" if name == "pase" else None)
    for column in out.columns:
        column.no_wrap = True
    return out


def _print(ours: PlanData, rows: Rows) -> None:
    from pase.plan.table import devices_text, misfit_text

    c = console()
    tables = (_table(ours, rows, _SPARED[:n]) for n in range(len(_SPARED) + 1))
    unlimited = c.options.update(max_width=UNWRAPPED)
    out = next(
        (t for t in tables if c.measure(t, options=unlimited).maximum <= c.width),
        _table(ours, rows, _SPARED),
    )
    c.print(
        f"{ours.model} on {devices_text(ours)} of {ours.machine}, cost model '{ours.cost_model}': predictions, "
        f"{ours.objective}",
    )
    c.print(out)
    equal = recommended(rows)
    if len(equal) > 1:
        c.print(
            f"equal within what prices may be off: {', '.join(equal)}. The simplest of them is {equal[0]}."
        )
    for name, why in ours.skipped.items():
        c.print(f"without {name}: {why}")
    batches = f"{ours.accumulate} micro-batches" if ours.accumulate > 1 else "one micro-batch"
    recomputed = (
        f"{len(ours.remat)} blocks recomputed" if ours.remat else "recomputation as the model marks it"
    )
    c.print(
        f"every row runs {batches}, {recomputed}, and no work of a framework's own; what a framework adds: pase price "
        f"--as fsdp={ours.devices} --like-search"
    )
    if (warning := misfit_text(ours)) is not None:
        c.print(f"WARNING {warning}", style="bold red")
    for remark in ours.remarks:
        c.print(f"note   {remark}")
    notes: dict[str, list[str]] = {}
    for name, p in rows:
        for remark in p.remarks:
            if not any(remark in said for said in ours.remarks):
                notes.setdefault(remark, []).append(name)
    for remark, of in notes.items():
        named = ", ".join(of) if len(of) < 3 else f"{of[0]} and {len(of) - 1} more"
        c.print(f"note   {named}: {remark}")


def _varied(points: list[Point], model: str, options: CompileOptions) -> dict[str, object]:
    """The object that --json prints for --vary."""
    rows = [
        {
            "factors": dict(p.factors),
            "cost": p.ours,
            "best": p.best,
            "regret": p.regret,
            "winner": p.winner,
            "mesh": list(p.mesh),
            "changed_nodes": p.changed,
            "others": dict(p.others),
        }
        for p in points
    ]
    return {
        "model": model,
        "devices": options.devices,
        "machine": options.machine or DEFAULT,
        "cost_model": options.cost_model,
        "vary": rows,
    }


def _print_varied(points: list[Point], model: str, options: CompileOptions) -> None:
    """Print a table with a row for each combination of factors."""
    from pase.plan.columns import columns
    from pase.plan.table import cost_text

    unit = "FLOP" if options.cost_model == "paper" else "s"
    words = ("its mesh", "cheapest strategy", "next strategy")
    out = columns(*points[0].factors, "ours", "best of a new search", "regret", *words, left=words)
    for p in points:
        follower = min(p.others.items(), key=lambda pair: pair[1], default=None)
        out.add_row(
            *(f"×{f:g}" for f in p.factors.values()),
            cost_text(p.ours, unit),
            cost_text(p.best, unit),
            f"{p.regret:.2%}",
            "×".join(map(str, p.mesh)),
            p.winner,
            f"{follower[0]} ×{follower[1] / p.ours:.3f}" if follower and p.ours else "",
            style="bold" if all(f == 1 for f in p.factors.values()) else None,
        )
    worst = max(points, key=lambda p: p.regret)
    c = console()
    c.print(
        f"{model} on {options.devices} devices of {options.machine or DEFAULT}: the strategy found for this machine, "
        f"on machines with other figures",
    )
    c.print(out)
    where = ", ".join(f"{k} ×{v:g}" for k, v in worst.factors.items())
    beaten = sorted({p.winner for p in points} - {"pase"})
    c.print(
        f"worst regret {worst.regret:.2%} at {where}; "
        + (
            f"other strategies are better somewhere: {', '.join(beaten)}"
            if beaten
            else "no other strategy is better anywhere"
        ),
    )
