"""``pase optimize``: searches for changes that make a traced run faster."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from pase.commands.options import AlignOption, JsonOption, print_headline, print_report, progress
from pase.files.atomic import write_atomically
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.files.terminal import console

__all__ = ["optimize"]

PURPOSE = "Traces"
_MOST_FUSED = 5
_COLUMNS = 120


def optimize(
    traces: Annotated[Path, typer.Argument(help="A folder of traces, or one trace.", metavar="TRACES")],
    budget: Annotated[float, typer.Option(help="Seconds to spend on the search.")] = 10.0,
    passes: Annotated[str, typer.Option(help="The passes to try, separated by commas. Default: all.")] = "",
    scheme: Annotated[
        str, typer.Option(help="How the run synchronises tensors: ring, or ps (parameter servers).")
    ] = "ring",
    memory_limit: Annotated[
        str, typer.Option(help="First reduce the peak memory below this, for example 16GiB.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the changes as JSON.", callback=written_as("JSON")),
    ] = None,
    align: AlignOption = "ends",
    force: Annotated[
        bool, typer.Option(help="Optimize even if the replay of this run is not reliable.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find changes that would make a traced run faster.

    Replays the run and tries tensor fusion and partition, op fusion, and, to save memory, recomputation and gradient
    accumulation.

    Prints each change that helps, with the predicted time of an iteration before and after it, then the buckets and the
    memory of each alternative.

    \b
    Examples:
      pase optimize traces/ --budget 30
      pase optimize traces/ --memory-limit 16GiB -o changes.json
    """
    from pase.errors import PaseError
    from pase.files.quantities import parse_bytes
    from pase.replay.changes.memory import memory_use
    from pase.replay.changes.optimize import optimize_graph
    from pase.replay.measurement.clocks import align as align_clocks
    from pase.replay.measurement.model import measure
    from pase.replay.reports.report import load_any, optimize_report
    from pase.replay.reports.trust import Run

    if scheme not in ("ring", "ps"):
        raise PaseError(f"there is no scheme '{scheme}'", where="--scheme", fix="choose ring or ps")
    if not 0 < budget < 1e6:
        raise PaseError(
            f"{budget} is not a time for the search",
            where="--budget",
            fix="give a positive number of seconds",
        )
    chosen = [p.strip() for p in passes.split(",") if p.strip()]
    limit = int(parse_bytes(memory_limit, "--memory-limit")) if memory_limit else None
    with progress() as say:
        t = load_any(traces, say)
        say("aligning clocks and finding iterations")
        run = Run(measured=measure(align_clocks(t, align)))
        say("replaying iterations")
        run.must_be_believed(f"{traces}: optimize", force)
        say(f"searching for {budget:g} s")
        outcome = optimize_graph(
            run.graph,
            budget_s=budget,
            passes=chosen,
            scheme=scheme,
            memory=memory_use(run.measured),
            memory_limit_bytes=limit,
        )
        report = optimize_report(str(traces), run, outcome)
    if output is not None:
        write_atomically(output, json.dumps(report, indent=1, allow_nan=False) + "\n")
    print_report(report, as_json, _print_plan)


def _print_plan(report: JsonObject) -> None:
    out = console()
    print_headline(out, report)
    out.print(
        f"{report['source']}: measured {report['measured_s'] * 1e3:.2f} ms; "
        f"{report['before_s'] * 1e3:.2f} -> {report['after_s'] * 1e3:.2f} ms an "
        f"iteration by replay (×{report['speedup']:.3f}); {report['evaluations']} replays in "
        f"{report['seconds']:.2f} s, {report['ended']}"
    )
    if report["within_spread"] and report["speedup"] != 1:
        out.print(f"  smaller than the spread of the iterations (±{report['spread']:.1%})")
    for s in report["steps"]:
        out.print(
            f"  {s['pass']}: {s['what']}: {s['before_s'] * 1e3:.2f} -> {s['after_s'] * 1e3:.2f} ms",
        )
    out.print(f"  {report['rolled_back']} steps were tried and undone")
    for b in report["buckets"]:
        size = f", {bytes_text(b['bytes'])}" if b["bytes"] is not None else ""
        parts = f", in {b['parts']} parts" if b["parts"] > 1 else ""
        first, last = b["after"]
        ready = f"; ready after {first}" + (f" .. {last}" if last != first else "") if first else ""
        which = f"{len(b['tensors'])} of {report['tensors']}, numbers {b['tensors'][0]} to {b['tensors'][-1]}"
        out.print(f"  bucket of {b['operation']}s ({which}{size}{parts}){ready}", markup=False)
    if report["fused_runs"]:
        out.print(f"  {report['fused_ops']} ops in {report['fused_runs']} fused runs")
    for run, times in Counter(tuple(r) for r in report["fused"]).most_common(_MOST_FUSED):
        out.print(f"    {times} of {len(run)} ops: {' + '.join(dict.fromkeys(run))}"[:_COLUMNS], markup=False)
    for o in report["memory"]:
        mark = "*" if o["chosen"] else " "
        out.print(
            f" {mark}memory {o['name']}: {o['iteration_s'] * 1e3:.2f} ms, peak {o['peak_bytes'] / 2**30:.2f} GiB"
        )
