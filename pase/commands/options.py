"""Options that several commands share, and functions that print progress, reports and warnings."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.progress import estimating, seldom
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.compiler.problem.problem import Progress
    from pase.files.terminal import Console
    from pase.plan.types import PlanData

__all__ = [
    "AlignOption",
    "ChoicesTimeLimit",
    "FailuresOption",
    "JsonOption",
    "LayoutFile",
    "LayoutMachine",
    "LayoutModel",
    "LayoutOutput",
    "ModelName",
    "StrictOption",
    "compile_options",
    "on_the_host",
    "print_json",
    "print_report",
    "progress",
    "strictly",
    "warn_misfit",
]


def _complete_model(incomplete: str) -> list[str]:
    from pase.zoo import names

    return [f"zoo:{n}" for n in names() if f"zoo:{n}".startswith(incomplete)]


def _complete_machine(incomplete: str) -> list[str]:
    from pase.machine.load import names

    return [n for n in names() if n.startswith(incomplete)]


@contextmanager
def on_the_host() -> Iterator[None]:
    """JAX traces on the CPU, unless JAX_PLATFORMS says otherwise, and reports no GPU plugin that finds no driver.

    A command that only plans needs no device: it would take a GPU's memory from the program that trains there. The
    commands that use devices have ``USES_DEVICES = True`` in their modules.
    """
    if _PLATFORMS in os.environ:
        yield
        return
    from pase.frontends.jax.drivers import quiet_about_drivers

    os.environ[_PLATFORMS] = "cpu"
    try:
        with quiet_about_drivers():
            yield
    finally:
        del os.environ[_PLATFORMS]


_PLATFORMS = "JAX_PLATFORMS"


ModelName = Annotated[
    str,
    typer.Argument(
        autocompletion=_complete_model,
        help="zoo:NAME (with settings: 'zoo:gpt2?batch=128&seq=1024'), a model file (.onnx, .keras, .pb, or the folder "
        "of a SavedModel), or package.module:function. The function returns (loss_fn, params, *batch) or a model "
        "object of a framework; shapes are enough.",
        metavar="MODEL",
        show_default=False,
    ),
]
LayoutFile = Annotated[
    Path,
    typer.Argument(help="A layout.json that 'pase compile' wrote.", metavar="LAYOUT", show_default=False),
]
LayoutModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The layout's model, if it is not a zoo model. It is traced again to price the alternatives.",
    ),
]
LayoutMachine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help="The machine file that the layout was compiled for, if it is not one of pase's own.",
        autocompletion=_complete_machine,
    ),
]
ChoicesTimeLimit = Annotated[
    float,
    typer.Option("--time-limit", help="Seconds to spend on the best alternative of each layer.", min=0.0),
]
FailuresOption = Annotated[
    float | None,
    typer.Option(
        "--failures",
        help="With --tokens: failures per device-hour that stop the run. Default: the machine file's.",
        metavar="RATE",
    ),
]


def _alignment(method: str) -> str:
    if method not in ("ends", "dpro", "none"):
        raise PaseError(f"there is no method '{method}'", where="--align", fix="choose ends, dpro or none")
    return method


AlignOption = Annotated[
    str, typer.Option(help="How to align the clocks of ranks: ends, dpro or none.", callback=_alignment)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
]

LayoutOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write the plan to this file, as layout JSON. Other commands read it.",
        metavar="FILE",
        callback=written_as("JSON", page="write layout.json, then run: pase report layout.json -o FILE.html"),
    ),
]

StrictOption = Annotated[
    bool,
    typer.Option("--strict", help="Exit with status 1 if the plan does not fit in memory or has a warning."),
]


def strictly(sound: bool, strict: bool) -> None:
    """Exit with status 1 if the user passed --strict and the plan is not sound (``PlanData.sound``)."""
    if strict and not sound:
        raise typer.Exit(1)


def warn_misfit(plan: PlanData) -> None:
    """Print a plan's warnings on standard error: that it does not fit, and remarks that cast doubt on it.

    This is for commands whose standard output is JSON or does not show the plan.
    """
    from pase.plan.table import misfit_text

    out = console(err=True)
    if (warning := misfit_text(plan)) is not None:
        out.print(f"WARNING {warning}")
    for r in plan.noted:
        if r.doubtful:
            out.print(f"note   {r}")


def _layout_options(model: str) -> dict[str, Any]:
    """The options that a layout knows, and its model; none if the model is not a layout."""
    from pase.plan.layout import load
    from pase.replay.reports.report import is_layout

    if not is_layout(Path(model)):
        return {}
    plan = load(model)
    return {
        "model": plan.model,
        "devices": plan.devices + plan.idle,
        "machine": plan.machine,
        "cost_model": plan.cost_model,
        "optimizer": plan.optimizer,
    }


def compile_options(
    *names: str, of_layout: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: add fields of CompileOptions as flags to a command that takes ``options: CompileOptions``.

    names: the fields; none for all fields that have a flag. The flags come between the command's arguments and its own
    flags.
    of_layout: whether the command's model may be a layout, which then has devices, machine, cost model and optimizer.
        Flags that are given replace them. The command also gets ``layout``, the file's name or None.
    """

    def taken(command: Callable[..., None]) -> Callable[..., None]:
        chosen = [
            f for f in fields(CompileOptions) if f.metadata["flag"].names and (f.name in names or not names)
        ]
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name not in ("options", "layout")]
        first = [p for p in own if p.default is p.empty]
        flags = [_as_flag(f, required=not of_layout) for f in chosen]
        order = [*first, *flags, *(p for p in own if p not in first)]
        listed = signature.replace(parameters=[p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in order])

        @functools.wraps(command)
        def run(*args: object, **keywords: object) -> None:
            given = listed.bind(*args, **keywords).arguments
            read = {f.name: given.pop(f.name) for f in chosen if f.name in given}
            if of_layout:
                known = _layout_options(given["model"])
                given["layout"] = given["model"] if known else None
                given["model"] = known.pop("model", given["model"])
                default = {f.name: None if f.default is MISSING else f.default for f in chosen}
                read |= {
                    name: v for name, v in known.items() if read.get(name, default[name]) == default[name]
                }
                if read.get("devices") is None:
                    raise PaseError(
                        "the number of devices is missing",
                        where="--devices",
                        fix="say --devices N, or give a layout.json, which has it",
                    )
            pairs = {f.name: f.metadata["flag"].pairs for f in chosen if f.metadata["flag"].pairs}
            many = {name: parse(read.get(name)) for name, parse in pairs.items()}
            # A command without this flag sets the number of devices itself, for each plan.
            one = {} if any(f.name == "devices" for f in chosen) else {"devices": 1}
            command(**given, options=CompileOptions(**one | read | many))

        run.__signature__ = listed  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in order}
        return run

    return taken


def _as_flag(f: Field[object], *, required: bool = True) -> inspect.Parameter:
    """The typer parameter of an option. Typer parses numbers; everything else is text that CompileOptions parses.

    required: whether an option without a default must be given.
    """
    flag = f.metadata["flag"]
    types = (f.type, *get_args(f.type))
    number = next((t for t in (int, float) if t in types and str not in types), str)
    plain: Any = list[str] if flag.pairs else number
    optional = f.default is MISSING and not required
    if f.default is None or optional:
        plain = plain | None
    info = typer.Option(
        *flag.names,
        help=f.metadata["help"] + (" May be given several times." if flag.pairs else ""),
        metavar=flag.metavar,
        min=flag.minimum,
        autocompletion=_complete_machine if f.name == "machine" else None,
        rich_help_panel=f.metadata["flag"].about,
    )
    default = None if optional else inspect.Parameter.empty if f.default is MISSING else f.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(f.name, kind, default=default, annotation=Annotated[plain, info])


@contextmanager
def progress() -> Iterator[Progress]:
    """Yields a function that shows a line of progress on standard error.

    The line has the elapsed time and an estimate of the remaining time. If standard error is not a terminal, such as
    the log of a job, it gets a line after ten seconds and then every minute.
    """
    err = console(err=True)
    if not err.is_terminal:
        with seldom(err.print) as told:
            yield told
        return
    with err.status("") as status:
        yield estimating(status.update)


def print_headline(out: Console, report: JsonObject) -> None:
    """Print what a report of traces says first: what is missing of them, which decides what the rest is worth, and the
    conclusion."""
    for problem in report["problems"]:
        out.print(f"note: {problem}")
    if report.get("verdict"):
        out.print(report["verdict"], markup=False, highlight=False)
    out.print(report["headline"])


def print_report(report: JsonObject, as_json: bool, human: Callable[[JsonObject], None]) -> None:
    """Print a report as one line of JSON, or with the function ``human``."""
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        human(report)


def print_json(data: object) -> None:
    """Print an object as indented JSON."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")
