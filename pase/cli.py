"""The ``pase`` program: one table of commands, each imported only when it is run.

Exit status: 0 done; 1 the request cannot be met (``Infeasible``); 2 bad usage or bad input
(``PaseError``, a file that cannot be read); 130 stopped by Ctrl-C; 70 a fault of pase's own,
with its traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from pase import __version__
from pase.errors import Infeasible, PaseError

__all__ = ["COMMANDS", "command_group", "main"]

INFEASIBLE, BAD_INPUT, OWN_FAULT, INTERRUPTED = 1, 2, 70, 130

# name -> (module:function, one line of help). To add a command: write the function, add its line here.
# A line whose module is not there (yet) is left out of the program.
COMMANDS: dict[str, tuple[str, str]] = {
    "compile": (
        "pase.commands.compile:compile",
        "Find a model's best strategy, print it, write layout.json.",
    ),
    "compare": (
        "pase.commands.compare:compare",
        "Data parallel, the experts' strategies and ours, side by side.",
    ),
    "run": ("pase.commands.run:run", "Run one sharded training step of a layout on devices here."),
    "emit": ("pase.commands.emit:emit", "Write a layout in the terms of ONNX or another program."),
    "explain": ("pase.commands.explain:explain", "Where every second and byte of a layout comes from."),
    "report": ("pase.commands.report:report", "A layout as one page of HTML."),
    "zoo": ("pase.commands.zoo:zoo", "The models that come with pase."),
    "machines": (
        "pase.commands.machines:machines",
        "The machines that come with pase, each number with its source.",
    ),
    "ops": ("pase.commands.ops:ops", "The framework ops that pase can read."),
    "calibrate": ("pase.commands.calibrate:calibrate", "Measure this machine and write a machine file."),
    "schedule": ("pase.commands.schedule:schedule", "Order, fuse and split a step's communication."),
    "replay": ("pase.commands.replay:replay", "Replay traces of a run, or a layout, as one timeline."),
    "diagnose": ("pase.commands.diagnose:diagnose", "Why a traced run is slow."),
    "optimize": ("pase.commands.optimize:optimize", "What would make a traced run faster."),
    "profile": ("pase.commands.profile:profile", "Run a program and collect what replay needs."),
    "solve": ("pase.commands.solve:solve", "The search engine alone, on an instance file."),
}

HELP = """How to split every layer of a model over the devices, proven best under its cost model."""

EPILOG = """Examples:

  pase zoo                                     which models there are to try
  pase compile zoo:gpt2 --devices 32           the best strategy, beside data parallelism
  pase compile mymodel:step --devices 8 --machine a100x8 -o layout.json
  pase compare zoo:gpt2 --devices 32           every known strategy, priced alike
  pase run layout.json --reduced --devices 8   one step of it here, on host devices

MODEL is zoo:NAME (with ?batch=128&seq=1024), a file, or package.module:function.
With --json, a command prints one JSON object on standard output and nothing else there.
Exit status: 0 done, 1 the request cannot be met, 2 bad usage or input.
pase COMMAND --help says more."""


def _known(target: str) -> bool:
    """True where the target's module exists; only its parent package is imported."""
    try:
        return importlib.util.find_spec(target.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def _loaded(name: str, target: str) -> Any:
    """The command behind ``module:function``, with the options that the function's signature asks for."""
    module, _, function = target.partition(":")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=name)(getattr(importlib.import_module(module), function))
    return typer.main.get_command(app)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(status)


def _stop_writing() -> None:
    """Whoever read our output (head, say) has seen enough: the rest goes nowhere, without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Group(TyperGroup):
    """Lists all commands from their one line of help, loads only the one that runs, maps its errors."""

    targets: Mapping[str, str]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.targets:
            command = _loaded(name, self.targets[name])
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Infeasible as e:
            _fail(str(e), INFEASIBLE)
        except PaseError as e:
            _fail(str(e), BAD_INPUT)
        except BrokenPipeError:
            _stop_writing()
            raise typer.Exit(0) from None
        except OSError as e:
            where = f"{e.filename}: " if e.filename is not None else ""
            _fail(f"{where}{e.strerror or e}", BAD_INPUT)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        # Kept line by line: it holds examples to copy.
        if self.epilog:
            formatter.write("\n" + self.epilog + "\n")


def _placeholder() -> None:
    """Stands for a command in the list of commands; resolve_command puts the real one in its place."""


def command_group(commands: Mapping[str, tuple[str, str]] = COMMANDS) -> Any:
    """The program with those of these commands whose modules exist; call its ``main(args=…)``."""
    known = {name: (target, line) for name, (target, line) in commands.items() if _known(target)}

    app = typer.Typer(
        cls=_Group,
        help=HELP,
        epilog=EPILOG,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback(invoke_without_command=True)
    def pase(
        ctx: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    ) -> None:
        if version:
            typer.echo(f"pase {__version__}")
            raise typer.Exit()
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())
            raise typer.Exit()

    for name, (_, line) in known.items():
        app.command(name=name, help=line)(_placeholder)
    group = typer.main.get_command(app)
    assert isinstance(group, _Group)
    group.targets = {name: target for name, (target, _) in known.items()}
    return group


def main(args: list[str] | None = None) -> NoReturn:
    """Run the program and leave with its exit status; ``args`` defaults to the command line's."""
    try:
        command_group().main(args=args, prog_name="pase")
    except SystemExit:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _stop_writing()
        raise
    except Exception:  # whatever input is to blame for has been mapped in _Group.invoke
        traceback.print_exc()
        typer.echo("Error: this is a fault of pase itself; please report it with the lines above", err=True)
        sys.exit(OWN_FAULT)
    raise AssertionError("main() of the command line always exits")


if __name__ == "__main__":
    main()
