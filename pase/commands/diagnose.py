"""``pase diagnose``: why a traced run is slow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["diagnose"]


def diagnose(
    traces: Annotated[Path, typer.Argument(help="A folder of traces, or one trace.")],
    page: Annotated[Path | None, typer.Option("-o", "--output", help="Write an HTML page.")] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write the aligned timeline with findings and critical path, for Perfetto."),
    ] = None,
    align: Annotated[str, typer.Option(help="How clocks are aligned: ends, dpro or none.")] = "ends",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Why a traced run is slow.

    Gives each reason in plain words, with what it costs.
    """
    from pase.errors import PaseError
    from pase.replay.analyse import path_steps
    from pase.replay.clocks import align as align_clocks
    from pase.replay.diagnose import diagnose_run
    from pase.replay.model import measure
    from pase.replay.page import diagnosis_page
    from pase.replay.report import load_any
    from pase.replay.timeline_io import save_timeline

    if align not in ("ends", "dpro", "none"):
        raise PaseError(f"--align {align}: there are ends, dpro and none")
    m = measure(align_clocks(load_any(traces), align))
    d = diagnose_run(m)
    problems = [str(p) for p in m.timeline.problems]
    if page is not None:
        page.write_text(diagnosis_page(d, str(traces), problems))
    if timeline is not None:
        steps = path_steps(d.graph, d.replay)
        marked = [int(d.graph.event[s.task]) for s in steps if d.graph.event[s.task] >= 0]
        drawn = [{**asdict(e), "name": f"{f.kind}: {e.name}"} for f in d.findings for e in f.evidence]
        save_timeline(m.timeline, timeline, critical=marked, findings=drawn)
    if as_json:
        report = {
            "source": str(traces),
            "iteration_s": d.iteration_ns / 1e9,
            "findings": [
                {
                    "kind": f.kind,
                    "title": f.title,
                    "detail": f.detail,
                    "cost_s": f.cost_ns / 1e9,
                    "share": f.cost_ns / d.iteration_ns,
                    "evidence": [
                        {
                            "rank": e.rank,
                            "name": e.name,
                            "start_s": e.start_ns / 1e9,
                            "seconds": e.duration_ns / 1e9,
                        }
                        for e in f.evidence
                    ],
                }
                for f in d.findings
            ],
            "ranks": [
                {
                    "rank": u.rank,
                    "iteration_s": u.length_ns / 1e9,
                    "compute_s": u.compute_ns / 1e9,
                    "communication_s": u.communication_ns / 1e9,
                    "exposed_communication_s": u.exposed_ns / 1e9,
                    "waiting_s": u.waiting_ns / 1e9,
                    "idle_s": u.idle_ns / 1e9,
                }
                for u in d.uses
            ],
            "problems": problems,
        }
        typer.echo(json.dumps(report, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{traces}[/bold]: {d.iteration_ns / 1e6:.2f} ms an iteration")
    for f in d.findings:
        cost = f"-{f.cost_ns / 1e6:.2f} ms ({f.cost_ns / d.iteration_ns:.1%})" if f.cost_ns else "remark"
        console.print(f"\n[bold]{f.title}[/bold]  [red]{cost}[/red]", markup=True)
        console.print(f"  {f.detail}", markup=False)
    for p in problems:
        console.print(f"[yellow]note[/yellow] {p}")
