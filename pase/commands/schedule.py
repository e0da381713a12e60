"""``pase schedule``: schedules the communication of a layout, a profile or traces, and compares policies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import warn_misfit
from pase.files.atomic import write_atomically
from pase.files.formats import written_as
from pase.files.quantities import bytes_text
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.schedule.compare import PolicyResult
    from pase.schedule.plan import BucketPlan
    from pase.schedule.preserver import TrainingState
    from pase.schedule.types import Link, ScheduleProblem

__all__ = ["schedule"]

PURPOSE = "Run and hand over"


def schedule(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="LAYOUT|PROFILE|TRACES",
            help="A layout.json, a problem JSON, a PipeDream profile, or traces (a folder, a file or a timeline).",
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="The name of a policy, several names separated by commas, or 'all'.",
            autocompletion=lambda incomplete: _policies(incomplete),
        ),
    ] = "ours",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the bucket plan of 'ours', or else of the best policy, to this file.",
            callback=written_as("JSON", page="--gantt FILE.html draws the schedule"),
        ),
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option(help="Draw the steady iteration of each policy, as FILE.html or FILE.png.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Store the bucket plan in LAYOUT itself, under bucket_plan.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write the predicted step as a timeline, which pase replay and Perfetto can load."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="For traces: the rank whose iteration is scheduled.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="A link to send on: NAME:STARTUP:BANDWIDTH, as in nccl:50us:5GB/s, or NAME:FILE.csv with bytes and "
            "seconds. May be given several times. Default: the links of the layout, problem or traces."
        ),
    ] = None,
    staleness: Annotated[
        int,
        typer.Option(
            min=0,
            help="The greatest age in iterations that a gradient may have when it is applied; 0 for plain updates.",
        ),
    ] = 0,
    loss: Annotated[
        str | None,
        typer.Option(
            help="For policy 'deft': the state of training, from which its Preserver decides: "
            "loss=,lowest=,lr=,mean=,spread=,batch=,lr_scaling=, "
            "separated by commas."
        ),
    ] = None,
    mode: Annotated[
        str, typer.Option(help="For policy 'ours': fast, exact, or auto (exact for small problems).")
    ] = "auto",
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds for exact mode.")
    ] = 10.0,
    dataflow: Annotated[
        bool,
        typer.Option(help="For profiles: compute runs any layer whose inputs are ready, as TensorFlow does."),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed. The same seed gives the same plan, unless a time limit stops the search."
        ),
    ] = 0,
    emit: Annotated[
        str | None, typer.Option(help="Print settings for another program: xla, pgle or ddp.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Order, fuse and split a step's communication.

    Decides which tensors are sent together, in which order and on which link.

    Prints one line for each policy: the predicted time of an iteration, the exposed communication, and the gap to a
    lower bound that holds for every plan. -o writes the bucket plan as JSON, --write stores it in the layout, and
    --emit prints it as settings for XLA or PyTorch DDP. Without --link, a profile is sent at 5 GB/s with a startup of
    50 us.

    \b
    Examples:
      pase schedule layout.json --policy all
      pase schedule layout.json --policy ours --write
      pase schedule traces/ --policy ddp,ours --gantt iteration.html
    """
    from datetime import date

    from pase.errors import PaseError
    from pase.schedule.compare import compare_policies
    from pase.schedule.io import plan_to_json
    from pase.schedule.load import parse_link
    from pase.schedule.registry import Options

    plan, problem = _problem(source, tuple(parse_link(x) for x in link or ()), dataflow, rank)
    if plan is not None:
        warn_misfit(plan)
    if write and plan is None:
        raise PaseError(
            f"it stores the bucket plan in a layout, but {source} is not a layout",
            where="--write",
            fix="use --output instead",
        )
    options = Options(staleness=staleness, walk=_walk(loss), mode=mode, time_limit_s=time_limit, seed=seed)
    names = None if policy == "all" else [n.strip() for n in policy.split(",")]
    outcomes = compare_policies(problem, names, options)
    done = [o for o in outcomes if o.evaluation is not None]
    best = next((o for o in done if o.policy == "ours"), None) or min(done, key=lambda o: o.iteration_s)
    assert best.plan is not None and best.evaluation is not None
    if output is not None:
        data = plan_to_json(problem, best.plan, evaluation=best.to_json(), starts_s=best.evaluation.starts_s)
        write_atomically(output, json.dumps(data, indent=1) + "\n")
    if write:
        from pase.plan.buckets import holding

        assert plan is not None
        holding(plan, problem, best.plan).save(source)
    if timeline is not None:
        from pase.plan.buckets import timeline_of
        from pase.replay.traces.timeline_io import save_timeline

        save_timeline(timeline_of(problem, best.plan), timeline)
    if gantt is not None:
        from pase.schedule.gantt import write_gantt

        drawn = [o.evaluation for o in done if o.evaluation is not None]
        write_gantt(gantt, problem, drawn, date.today().isoformat())
    if emit is not None:
        print(_settings(emit, problem, best.plan), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        shown = [o.to_json() for o in outcomes]
        head = {
            "problem": problem.name,
            "compute_s": problem.compute_s - problem.held_s,
            "tensors": len(problem.tensors),
        }
        print(json.dumps(head | ({"policies": shown} if names is None or len(names) > 1 else shown[0])))
    elif emit is None:
        _table(problem, outcomes)


def _policies(given: str) -> list[str]:
    """Completions for a partly typed --policy."""
    from pase.schedule.registry import POLICIES

    before, comma, last = given.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*POLICIES, "all") if name.startswith(last)]


def _problem(
    source: Path, links: tuple[Link, ...], dataflow: bool, rank: int | None
) -> tuple[Plan | None, ScheduleProblem]:
    """Returns (the plan if the file is a layout, otherwise None; the scheduling problem)."""
    from pase.bridges.trace_profile import is_trace, problem_from_traces
    from pase.replay.reports.report import is_layout
    from pase.schedule.load import load_problem

    if is_layout(source):
        from pase.api import load
        from pase.plan.buckets import problem_of

        plan = load(source)
        return plan, problem_of(plan, links=links)
    if is_trace(source):
        return None, problem_from_traces(source, links=links, rank=rank)
    return None, load_problem(source, links=links, dataflow=dataflow)


def _settings(program: str, problem: ScheduleProblem, plan: BucketPlan) -> str:
    """The bucket plan as settings for another program. Raises PaseError if pase does not know the program."""
    from pase.errors import PaseError
    from pase.schedule import emit

    made = {
        "xla": lambda: "\n".join(emit.xla_flags(problem, plan)),
        "pgle": lambda: emit.pgle_text(problem, plan).rstrip(),
        "ddp": lambda: json.dumps(emit.ddp_caps_mb(problem, plan)),
    }
    if program not in made:
        raise PaseError(
            f"there are no settings for '{program}'", where="--emit", fix=f"choose {', '.join(made)}"
        )
    return made[program]()


def _walk(text: str | None) -> TrainingState | None:
    """Parse the Preserver's state of training from text such as "loss=0.2,lr=0.1". None stands for the default."""
    if text is None:
        return None
    from dataclasses import fields

    from pase.errors import PaseError
    from pase.schedule.preserver import TrainingState

    known = {f.name: f.type for f in fields(TrainingState)}
    values: dict[str, float | int | bool] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in known:
            raise PaseError(f"there is no '{key}'", where="--loss", fix=f"choose from {', '.join(known)}")
        try:
            if known[key] == "bool":
                values[key] = {"true": True, "false": False}[value.lower()]
            else:
                values[key] = int(value) if known[key] == "int" else float(value)
        except (ValueError, KeyError):
            raise PaseError(
                f"{key}={value!r} is not of type {known[key]}", where="--loss", fix=f"write {key}=VALUE"
            ) from None
    return TrainingState(**values)  # type: ignore[arg-type]


def _table(problem: ScheduleProblem, outcomes: list[PolicyResult]) -> None:

    from pase.plan.columns import columns

    out = console() if sys.stdout.isatty() else console(width=120)
    size = problem.nbytes
    out.print(
        f"{problem.name} · {len(problem.tensors)} tensors, {bytes_text(size)} · compute "
        f"{(problem.compute_s - problem.held_s) * 1e3:.2f} ms · links {', '.join(x.name for x in problem.links)}",
    )
    shares = ("exposed", "bubbles", "messages", "updates", "staleness", "gap to bound", "E")
    table = columns("policy", "iteration ms", *shares, left=("policy",))
    notes = []
    for o in outcomes:
        e = o.evaluation
        if e is None:
            notes.append(f"{o.policy}: left out. {o.note}")
            continue
        table.add_row(
            o.policy,
            f"{e.iteration_s * 1e3:.3f}",
            f"{e.exposed_s * 1e3:.3f}",
            f"{e.bubble_s * 1e3:.3f}",
            str(e.messages),
            f"{e.updates_per_iteration:.3g}",
            str(e.staleness),
            f"{o.gap * 100:.2f}%",
            f"{e.efficiency:.3f}",
        )
        if o.plan is not None and "preserver" in o.plan.detail:
            notes.append(f"{o.policy}: {o.plan.detail['preserver']}")
    out.print(table)
    plain = next((o.bound_s for o in outcomes if o.evaluation and not o.evaluation.staleness), None)
    if plain is not None:
        out.print(f"no plan without staleness is shorter than {plain * 1e3:.3f} ms")
    for note in notes:
        out.print(note)
