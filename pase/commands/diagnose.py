"""``pase diagnose``: explains why a traced run is slow."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import AlignOption, JsonOption, print_headline, print_report, progress
from pase.files.atomic import write_atomically
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.replay.reports.diagnose import MoreAdvice

__all__ = ["diagnose"]

PURPOSE = "Traces"


def diagnose(
    traces: Annotated[
        Path, typer.Argument(help="A folder of traces, one trace, or a memory profile.", metavar="TRACES")
    ],
    page: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the findings as an HTML page.", callback=written_as("an HTML page")
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write the aligned timeline with the findings and the critical path, for Perfetto."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The run's layout.json: put its prediction beside the trace, and say which assumption was off."
        ),
    ] = None,
    split: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another layout.json of the model, for the run's batch: rank its split among the advice (needs "
            "--plan). Give it again for more."
        ),
    ] = None,
    align: AlignOption = "ends",
    as_json: JsonOption = False,
) -> None:
    """Explain why a traced run is slow.

    Prints where the time goes: by kind of work, with the rates that it reaches, and the ops that take longest, by the
    names of the model, with their least times. Then, for each rank, the parts of an iteration (compute, exposed
    communication, waiting, ...) and each finding: what it costs, what to change, and the op in the trace that shows it.
    Reads traces of JAX and PyTorch, as pase profile writes them and as other profilers do.

    With --plan, each op's and collective's predicted and measured time stand side by side, and the difference between
    the predicted and the measured step is divided among what the prediction assumed: rates, precision, bytes, overlap,
    idle time. Of a pipeline, each rank's work and waiting stand beside the schedule's. pase calibrate --from TRACES
    corrects the machine file by the same trace.

    With --split as well, other layouts of the model are ranked among the advice: what the run would take under them, by
    the ratios of the two predictions.

    Of a memory profile of JAX (.prof) or a memory snapshot of PyTorch (.pickle), given instead of traces, prints what
    holds the device's memory, for PyTorch at the peak; with --plan, beside what the plan predicts.

    \b
    Examples:
      pase diagnose traces/
      pase diagnose traces/ -o diagnosis.html --timeline timeline.json.gz
      pase diagnose traces/ --plan layout.json
      pase diagnose traces/ --plan layout.json --split other.json
      pase diagnose snapshot.pickle --plan layout.json
    """
    from datetime import date

    from pase.errors import PaseError
    from pase.replay.measurement.clocks import align as align_clocks
    from pase.replay.measurement.model import measure
    from pase.replay.reports.diagnose import diagnose_run
    from pase.replay.reports.page import diagnosis_page
    from pase.replay.reports.report import diagnosis_report, load_any
    from pase.replay.traces.memory_profile import is_memory_profile
    from pase.replay.traces.timeline_io import save_timeline

    if is_memory_profile(traces):
        if split:
            raise PaseError("a memory profile has no times", where="--split", fix="leave it out")
        _memory(traces, plan, page, timeline, as_json)
        return
    with progress() as say:
        t = load_any(traces, say)
        say("aligning clocks and finding iterations")
        m = measure(align_clocks(t, align))
        say("replaying iterations, with and without each cause")
        d = diagnose_run(m, _splits(plan, split or []))
        report = diagnosis_report(str(traces), d)
    if plan is not None:
        from pase.bridges.plan_trace import against_plan

        report["plan"] = against_plan(plan, m, d.spent)
    if page is not None:
        write_atomically(page, diagnosis_page(d, report, date.today().isoformat()))
    if timeline is not None:
        g = d.run.graph
        tasks = [s.task % len(g) for s in d.run.replay.path()]
        drawn = [{**asdict(e), "name": f"{f.kind}: {e.name}"} for f in d.findings for e in f.evidence]
        save_timeline(
            m.timeline, timeline, critical=[int(e) for e in g.event[tasks] if e >= 0], findings=drawn
        )
    print_report(report, as_json, _print_findings)


def _splits(plan: Path | None, others: list[Path]) -> list[MoreAdvice]:
    from pase.bridges.restrategy import as_advice
    from pase.errors import PaseError

    if not others:
        return []
    if plan is None:
        raise PaseError(
            "the measured step is scaled by the predictions for two layouts, and that of the run is missing",
            where=f"--split {others[0]}",
            fix="give the layout of the run with --plan NOW.json",
        )
    return [as_advice(plan, others)]


def _memory(
    profile: Path, layout: Path | None, page: Path | None, timeline: Path | None, as_json: bool
) -> None:
    """Reports who holds a device's memory."""
    from dataclasses import asdict

    from pase.api import load
    from pase.errors import PaseError
    from pase.replay.reports.held import held_lines, held_page, held_report
    from pase.replay.traces.memory_profile import read_memory

    if timeline is not None:
        raise PaseError("a memory profile has no timeline", where="--timeline", fix="leave it out")
    found = read_memory(profile)
    account = None if layout is None else asdict(load(layout).memory)
    report = held_report(str(profile), found, account)
    if page is not None:
        write_atomically(page, held_page(report))

    def lines(report: JsonObject) -> None:
        out = console()
        for line in held_lines(report):
            out.print(line, markup=False, highlight=False)

    print_report(report, as_json, lines)


def _print_findings(report: JsonObject) -> None:
    from pase.replay.reports.sent import sent_lines
    from pase.replay.reports.spent import spent_lines

    out = console()
    print_headline(out, report)
    out.print(
        f"{report['source']}: {report['measured_s'] * 1e3:.2f} ms an iteration, replayed "
        f"{report['replayed_s'] * 1e3:.2f} ms",
    )
    if report["spent"]:
        slowest = max(report["spent"], key=lambda s: s["step_s"])
        for line in spent_lines(slowest):
            out.print(line, markup=False, highlight=False)
    if "plan" in report:
        from pase.replay.reports.against import against_lines

        out.print()
        for line in against_lines(report["plan"]):
            out.print(line, markup=False, highlight=False)
    for number, line in enumerate(sent_lines(report["collectives"])):
        out.print("" if number else "\n", line, sep="", markup=False, highlight=False)
    for r in report["ranks"]:
        out.print(f"\nrank {r['rank']}: {r['measured_s'] * 1e3:.2f} ms")
        small = 0.0
        for p in r["parts"]:
            if p["seconds"] < 0.005 * r["measured_s"]:
                small += p["seconds"]
                continue
            what = f" ({p['what']})" if p["what"] else ""
            out.print(f"  {p['seconds'] * 1e3:9.2f} ms  {p['in_words']}{what}")
        if small:
            out.print(f"  {small * 1e3:9.2f} ms  other causes, below 0.5% each (--json has them)")
    for f in report["findings"]:
        untested = "" if report["tested"] else ", error unknown"
        cost = f"-{f['cost_s'] * 1e3:.2f} ms ({f['share']:.1%}{untested})" if f["cost_s"] else ""
        seen = f"{f['measured_s'] * 1e3:.2f} ms measured" if f["measured_s"] else "remark"
        out.print(f"\n{f['title']}: {cost or seen}")
        out.print(f"  {f['detail']}")
        for e in f["evidence"][:1]:
            at = f"rank {e['rank']}, {e['start_s'] * 1e3:.3f} ms into the trace, {e['seconds'] * 1e3:.3f} ms long"
            out.print(f"  See {at}: {e['name'][:80]}")
