"""The ``pase`` program. Each file of ``pase/commands`` is a command, found by itself and imported only when it is run.

Exit status: 0 done; 1 the request cannot be met (``Infeasible``); 2 bad usage or bad input
(``PaseError``, a file that cannot be read); 130 stopped by Ctrl-C; 70 a fault of pase's own,
with its traceback.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from pase import __version__
from pase.errors import Infeasible, PaseError
from pase.files.terminal import UNWRAPPED, printable

__all__ = ["command_group", "main"]

INFEASIBLE, BAD_INPUT, OWN_FAULT, INTERRUPTED = 1, 2, 70, 130

PACKAGE = "pase.commands"
SHARED = "options"
"""The module of that package that is not a command; it holds what several commands share."""

HELP = """How to split every layer of a model over the devices, proven best under its cost model."""

EPILOG = """Examples:

  pase zoo                                     the models that you can try
  pase compile zoo:gpt2 --devices 32           the best strategy, next to data parallelism
  pase compile mymodel:step --devices 8 --machine a100x8 -o layout.json
  pase compare zoo:gpt2 --devices 32           known strategies, priced by one cost model
  pase run layout.json --reduced --devices 8   one step of it here, on host devices

MODEL is zoo:NAME (with ?batch=128&seq=1024), a file, or package.module:function.
With --json, a command prints one JSON object on standard output and nothing else there.
Exit status: 0 done, 1 the request cannot be met, 2 bad usage or input.
Use pase COMMAND --help for details."""


def _names(package: str) -> list[str]:
    """The commands of a package: its modules, none of them imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [m.name for m in found if m.name != SHARED]


def _line(package: str, name: str) -> str:
    """One line of help: the first of the docstring of the command's function, which is not imported for it."""
    spec = importlib.util.find_spec(f"{package}.{name}")
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise AttributeError(f"{spec.origin} has no function '{name}': each module of {package} is a command")


def _loaded(package: str, name: str) -> Any:
    """The command, with the options that its function's signature asks for."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=name)(getattr(importlib.import_module(f"{package}.{name}"), name))
    return typer.main.get_command(app)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"Error: {printable(message)}", err=True)
    raise typer.Exit(status)


def _stop_writing() -> None:
    """Whoever read our output (head, say) has seen enough: the rest goes nowhere, without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Commands(TyperGroup):
    """Lists all commands, loads only the one that runs, maps its errors."""

    package: str

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.commands:
            command = _loaded(self.package, name)
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for name, command in self.commands.items():
            command.help = _line(self.package, name)
        super().format_commands(ctx, formatter)

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


def command_group(package: str = "") -> Any:
    """The program with the commands of a package, pase's own unless one is named; call its ``main(args=…)``."""
    package = package or PACKAGE
    app = typer.Typer(
        cls=_Commands,
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
        wide: bool = typer.Option(
            False, "--wide", help="Wrap nothing, however wide: pase --wide compile ..."
        ),
    ) -> None:
        if wide:
            os.environ["COLUMNS"] = str(UNWRAPPED)
        if version:
            typer.echo(f"pase {__version__}")
            raise typer.Exit()
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())
            raise typer.Exit()

    for name in _names(package):
        app.command(name=name)(_placeholder)
    group = typer.main.get_command(app)
    assert isinstance(group, _Commands)
    group.package = package
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
