"""``pase replay``: aligns and replays the traces of a run, and reports how well the replay predicts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import AlignOption, JsonOption, print_headline, print_report, progress
from pase.errors import PaseError
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.bridges.degrees import KernelTimes
    from pase.replay.changes.rewrite import Rewrite
    from pase.replay.types import Timeline

__all__ = ["replay"]

PURPOSE = "Traces"


def replay(
    traces: Annotated[
        Path, typer.Argument(help="A folder of traces, one trace, or a layout.json.", metavar="TRACES")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Write the aligned timeline, with the critical path marked, for Perfetto.",
            callback=written_as("a timeline", page="pase diagnose TRACES -o FILE.html writes a page"),
        ),
    ] = None,
    predicted: Annotated[
        Path | None, typer.Option(help="Write the replayed iteration as a separate timeline.")
    ] = None,
    align: AlignOption = "ends",
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Predict the effect of a change: bandwidth=2, latency=0.5, ranks=128, data=128, host=0.5, "
            "op:REGEX=0.5, balance=1, stages=4, tensor=2 (with --model), bucket-plan=ours (or another policy of pase "
            "schedule), strategy=OTHER_LAYOUT.json. May be given several times.",
        ),
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(help="For --what-if strategy=: the layout of the traced run.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="For --what-if tensor=: the model of the run, such as 'zoo:gpt2?batch=4', with the batch size of one "
            "micro-batch on one rank."
        ),
    ] = None,
    ran: Annotated[str, typer.Option(help="For --what-if tensor=: the strategy of the traced run.")] = "tp=1",
    kernels: Annotated[
        list[Path] | None,
        typer.Option(
            help="For --what-if tensor=: traces of other runs on the same device, as a source of kernel times by shape."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="For --what-if tensor=: the machine whose roofline scales kernels that were not measured."
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="For --what-if bucket-plan=, if the trace has no sizes: NAME:STARTUP:BANDWIDTH (nccl:50us:5GB/s)."
        ),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            help="For --what-if bandwidth= and ranks=: the bandwidth of a rank's link each way, such as 25MB/s. "
            "It separates bytes from startups if the trace cannot."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Traces of a run of the layout: compare them with its predicted timeline, op by op."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Continue even if the replay of this run is not reliable.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replay a run's traces, and predict the effect of changes.

    Aligns the clocks of the traces, builds the graph of dependencies between ops, and replays an iteration on it.

    Prints the measured and the replayed time, how well the replay predicts iterations that it has not seen, and for
    each rank the milliseconds of compute, exposed communication and idle time. Each --what-if changes the graph, and
    prints the predicted iteration and its speedup.

    For a layout.json, the predicted step is replayed instead.

    \b
    Examples:
      pase replay traces/ -o timeline.json.gz
      pase replay traces/ --what-if bandwidth=2 --what-if bucket-plan=ours
      pase replay layout.json --against traces/
    """
    from pase.replay.reports.report import TimelineFiles, compare_timelines, replay_report

    planned = _planned(traces)
    if planned is not None and any(not k.startswith("strategy=") for k in what_if or ()):
        raise PaseError(
            "the step of a layout has no dependencies between its ops, so only its strategy can be changed",
            where=str(traces),
            fix="use --what-if strategy=OTHER_LAYOUT.json, compile with another --machine, or schedule with another "
            "--link",
        )
    if against is not None:
        report = compare_timelines(traces, against, align, timeline=planned)
        print_report(report, as_json, _comparison)
        return
    with progress() as say:
        say(f"reading and replaying {traces}" + (f", with {len(what_if)} changes" if what_if else ""))
        report = replay_report(
            traces,
            align=align,
            what_if=what_if or [],
            files=TimelineFiles(aligned=output, predicted=predicted),
            timeline=planned,
            rewrites=_rewrites(
                what_if or [], traces if planned is not None else layout, planned is not None, link or []
            )
            | _degrees(what_if or [], model, ran, kernels or [], machine, _rate(wire)),
            wire_bytes_per_s=_rate(wire),
            force=force,
        )
    print_report(report, as_json, _summary)


def _rate(wire: str | None) -> float | None:
    """The bytes per second that --wire gives; None if it is not given."""
    if wire is None:
        return None
    from pase.files.quantities import parse_rate

    return parse_rate(wire, "--wire")


def _planned(path: Path) -> Timeline | None:
    """The predicted step of a layout, with its own bucket plan or with ours. None if the file is not a layout."""
    from pase.replay.reports.report import is_layout
    from pase.replay.traces.reader import read_small_json

    if not is_layout(path) or read_small_json(path).get("timeline"):
        return None
    from pase.api import load
    from pase.errors import Infeasible

    planned = load(path).timeline
    if planned is None:
        raise Infeasible(
            "no collective is on a parameter, so there is nothing to schedule or replay",
            where=str(path),
            fix="compile for more devices",
        )
    return planned


def _rewrites(
    what_if: list[str], layout: Path | None, is_planned: bool, link: list[str]
) -> dict[str, Rewrite]:
    """The changes that ``pase.replay`` cannot make by itself: bucket plans and strategies."""
    out: dict[str, Rewrite] = {}
    for text in what_if:
        name, _, value = text.partition("=")
        if name == "bucket-plan":
            from pase.bridges.replan import by_policy
            from pase.schedule.load import parse_link

            out[text] = by_policy(value, [parse_link(x) for x in link])
        elif name == "strategy":
            from pase.bridges.restrategy import by_prediction, by_ratio

            if layout is None:
                raise PaseError(
                    "the measured step is scaled by the predictions for two layouts, and that of the run is missing",
                    where=f"--what-if {text}",
                    fix="give the layout of the run with --layout NOW.json",
                )
            out[text] = (by_prediction if is_planned else by_ratio)(layout, Path(value))
    return out


def _degrees(
    what_if: list[str],
    model: str | None,
    ran: str,
    kernels: list[Path],
    machine: str | None,
    wire_bytes_per_s: float | None,
) -> dict[str, Rewrite]:
    """The changes to other degrees of pipeline and tensor parallelism."""
    out: dict[str, Rewrite] = {}
    measured: KernelTimes | None = None
    for text in what_if:
        name, _, value = text.partition("=")
        if name not in ("stages", "tensor"):
            continue
        if not (value.isascii() and value.isdigit() and len(value) < 7 and int(value)):
            raise PaseError(
                f"'{value}' is not a positive whole number",
                where=f"--what-if {text}",
                fix=f"write it as {name}=4",
            )
        from pase.bridges.degrees import by_stages, by_tensor, loaded_kernel_times

        if name == "stages":
            out[text] = by_stages(int(value), wire_bytes_per_s)
            continue
        if model is None:
            raise PaseError(
                "the model of the run is needed to find which part of each product a device computes",
                where=f"--what-if {text}",
                fix="give --model 'zoo:gpt2?batch=4' or MODULE:FUNCTION, with the batch of one micro-batch of one rank",
            )
        measured = loaded_kernel_times(kernels) if measured is None else measured
        out[text] = by_tensor(int(value), model=model, ran=ran, machine=machine, measured=measured)
    return out


def _summary(report: JsonObject) -> None:
    from rich.table import Table

    out = console()
    print_headline(out, report)
    out.print(
        f"{report['source']}: {report['measured_s'] * 1e3:.2f} ms an iteration (±{report['spread']:.1%}), replayed "
        f"{report['replayed_s'] * 1e3:.2f} ms; {report['unexplained']:.1%} of its critical path is unexplained",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), title="milliseconds", title_justify="left")
    for column in ("rank", "measured", "replayed", "held out", "clock", "compute", "exposed", "idle"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in report["ranks"]:
        offset = f"{r['clock_offset_s'] * 1e3:+.3f}"
        if r["clock_uncertainty_s"]:
            offset += f"±{r['clock_uncertainty_s'] * 1e6:.1f}µs"
        times = [
            f"{r[k] * 1e3:.2f}"
            for k in ("measured_s", "replayed_s", "compute_s", "exposed_communication_s", "idle_s")
        ]
        error = f"{r['error']:+.2%}" if r["error"] is not None else "-"
        table.add_row(str(r["rank"]), *times[:2], error, offset, *times[2:])
    out.print(table)
    for i in report["iterations"]:
        note = "" if i["steady"] else f"  left out: {i['why_not']}"
        predicted = (
            f", from the others {i['replayed_s'] * 1e3:.2f} ms ({i['error']:+.2%})" if i["replayed_s"] else ""
        )
        out.print(f"iteration {i['iteration']}: {i['measured_s'] * 1e3:.2f} ms{predicted}{note}")
    if report["spent"]:
        out.print(f"where the time goes, and why: pase diagnose {report['source']}", highlight=False)
    for w in report["what_if"]:
        out.print(
            f"what if {w['knob']}: {w['iteration_s'] * 1e3:.2f} ms (now {w['base_s'] * 1e3:.2f}, ×{w['speedup']:.3f})",
        )
        if w["doubt"]:
            out.print(f"  not reliable: {w['doubt']}")
        if w["within_spread"] and w["speedup"] != 1:
            out.print(f"  smaller than the spread of the iterations (±{report['spread']:.1%})")
        if "control_s" in w:
            out.print(
                f"  {w['messages']} messages for {w['tensors']} collectives; the speedup compares with the run's own "
                f"plan with durations from the same fitted curve, {w['control_s'] * 1e3:.2f} ms"
            )
        if "note" in w:
            out.print(f"  {w['note']}")


def _comparison(report: JsonObject) -> None:
    from rich.table import Table

    out = console()
    table = Table(
        title=f"predicted {report['predicted_s'] * 1e3:.2f} ms, measured {report['measured_s'] * 1e3:.2f} ms"
    )
    for column in ("op", "predicted µs", "measured µs", "difference"):
        table.add_column(column, justify="right")
    for o in report["ops"][:30]:
        difference = o["measured_s"] - o["predicted_s"]
        table.add_row(
            o["name"],
            f"{o['predicted_s'] * 1e6:.1f}",
            f"{o['measured_s'] * 1e6:.1f}",
            f"{difference * 1e6:+.1f}",
        )
    out.print(table)
    alone = f"only predicted: {report['only_predicted']}, only measured: {report['only_measured']}"
    out.print(f"{report['matched']} ops matched; {alone}")
