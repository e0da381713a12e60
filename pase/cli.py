"""The ``pase`` program.

Each file of ``pase/commands`` is a command. It is found automatically, and imported only when it runs.

Exit status: 0 for success; 1 if the request cannot be met (``Infeasible``); 2 for bad usage or bad input
(``PaseError``, or a file that cannot be read); 130 if stopped by Ctrl-C; 70 for a defect of pase, with its traceback.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from pase import __version__
from pase.errors import Infeasible, PaseError, install_line
from pase.files.terminal import UNWRAPPED, printable

__all__ = ["command_group", "main"]

INFEASIBLE, BAD_INPUT, OWN_FAULT, INTERRUPTED = 1, 2, 70, 130

PACKAGE = "pase.commands"
SHARED = "options"
"""The module of the package that is not a command: it has the options that several commands share."""

HELP = (
    """Find how to split every layer of a model over devices. The split is proven best under a cost model."""
)

EPILOG = """Examples:

  pase zoo                                     list the models that you can try
  pase compile zoo:gpt2 --devices 32           find the best strategy
  pase compile mymodel:step --devices 8 --machine a100x8 -o layout.json
  pase compare zoo:gpt2 --devices 32           compare it with known strategies
  pase explain layout.json                     see where its time and memory go
  pase run layout.json --reduced --devices 8   run one step on this machine

MODEL is zoo:NAME (or 'zoo:NAME?batch=128'), a file, or package.module:function.
With --json, a command prints one JSON object on standard output, and only that: its result, or
{"error": {"what", "where", "fix", "status"}}.
Exit status: 0 success, 1 the request cannot be met, 2 bad usage or input.
JAX models are traced on the CPU, unless the environment's JAX_PLATFORMS says otherwise; pase run, profile,
calibrate and doctor use the devices that are there.
Use pase COMMAND --help for details."""


def _names(package: str) -> list[str]:
    """The names of a package's commands. The modules are not imported."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return [m.name for m in found if m.name != SHARED]


PURPOSES = ("Plan", "Run and hand over", "Price what you have", "Traces", "This installation")
"""The groups of the list of commands, in its order. A command's module names its group as PURPOSE."""


def _purpose_and_line(package: str, name: str) -> tuple[str, str]:
    """A command's group, and its line of help, the first of its function's docstring. The module is not imported."""
    spec = importlib.util.find_spec(f"{package}.{name}")
    assert spec is not None and spec.origin is not None
    purpose = "Commands"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="PURPOSE")], value=ast.Constant(value=str(purpose))):
                pass
            case ast.FunctionDef() if node.name == name:
                return purpose, (ast.get_docstring(node) or "").partition("\n")[0]
    raise AttributeError(f"{spec.origin} has no function '{name}': each module of {package} is a command")


def _loaded(package: str, name: str) -> Any:
    """The command with the options of its function's signature. This imports its module."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=name, cls=_Command)(getattr(importlib.import_module(f"{package}.{name}"), name))
    return typer.main.get_command(app)


def _fail(error: PaseError, status: int, ctx: Any) -> NoReturn:
    """Print the error on standard error, and with --json as an object on standard output too; then exit."""
    typer.echo(f"Error: {printable(str(error))}", err=True)
    if ctx.meta.get(_AS_JSON):
        said = {"what": error.what, "where": error.where, "fix": error.fix, "status": status}
        typer.echo(json.dumps({"error": said}))
    raise typer.Exit(status)


_AS_JSON = "pase.cli.json"
"""The key of a click context under which it is kept whether the command was asked for JSON."""

_EXTRAS = {
    "jax": "jax",
    "optax": "jax",
    "torch": "torch",
    "onnx": "onnx",
    "tensorflow": "tf",
    "mesh_tensorflow": "tf",
    "orbax": "checkpoints",
    "transformers": "exports",
    "ijson": "traces",
    "pyarrow": "traces",
}
"""Optional package -> the extra of pase that has it."""


def _missing(e: ModuleNotFoundError) -> PaseError | None:
    """The error if an optional package is not installed; None if anything else cannot be imported."""
    package = (e.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return PaseError(f"this needs {package}, which is not installed", fix=install_line(_EXTRAS[package]))


def _stop_writing() -> None:
    """Discard further output, because its reader (for example head) has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_VALUES = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH"}
_TYPE = re.compile(r"<(?:list\[)?(int|float|str|path)(?: range)?\]?>", re.IGNORECASE)
"""What typer writes for the value of an option that has no metavar: the Python type."""


class _Command(TyperCommand):
    """Its help lists arguments, then options by what they are about. Python's types are not in it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line. typer puts a required argument in braces; only alternatives have them."""
        return [p if "|" in p else re.sub(r"^\{(.*)\}", r"\1", p) for p in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        listed: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None:
                continue
            about = getattr(param, "rich_help_panel", None)
            if argument := param.param_type_name == "argument":
                row = (f"{param.metavar or param.name}{'...' * (param.nargs != 1)}", row[1])
            else:
                row = (_TYPE.sub(lambda found: _VALUES[found[1].lower()], row[0]), row[1])
            kind = "Arguments" if argument else "Options"
            listed.setdefault(about.capitalize() if about else kind, []).append(row)
        own = listed.pop("Options", [])
        for title, rows in {**listed, "Options": own}.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Commands(TyperGroup):
    """Lists all commands, loads only the one that runs, and maps its errors to exit status."""

    package: str

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[_AS_JSON] = "--json" in rest
        if name is not None and name in self.commands:
            command = _loaded(self.package, name)
            if not getattr(sys.modules[f"{self.package}.{name}"], "USES_DEVICES", False):
                from pase.commands.options import on_the_host

                ctx.with_resource(on_the_host())
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        listed: dict[str, list[tuple[str, str]]] = {purpose: [] for purpose in PURPOSES}
        for name in self.list_commands(ctx):
            purpose, line = _purpose_and_line(self.package, name)
            listed.setdefault(purpose, []).append((name, line))
        wide = max(len(name) for rows in listed.values() for name, _ in rows)
        for purpose, rows in listed.items():
            if rows:
                with formatter.section(purpose):
                    formatter.write_dl([(name.ljust(wide), line) for name, line in rows])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Infeasible as e:
            _fail(e, INFEASIBLE, ctx)
        except PaseError as e:
            _fail(e, BAD_INPUT, ctx)
        except ModuleNotFoundError as e:
            if (missing := _missing(e)) is None:
                raise
            _fail(missing, BAD_INPUT, ctx)
        except BrokenPipeError:
            _stop_writing()
            raise typer.Exit(0) from None
        except OSError as e:
            where = str(e.filename) if e.filename is not None else ""
            _fail(PaseError(e.strerror or str(e), where=where), BAD_INPUT, ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        # The lines are not wrapped, because they have examples to copy.
        if self.epilog:
            formatter.write("\n" + self.epilog + "\n")


def _placeholder() -> None:
    """A placeholder in the list of commands. resolve_command replaces it by the real command."""


def command_group(package: str = "") -> Any:
    """The program with the commands of a package. Call its ``main(args=…)``.

    package: the package of commands; pase's own if it is empty.
    """
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
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
        wide: bool = typer.Option(
            False, "--wide", help="Do not wrap lines. Give it before the command: pase --wide compile ..."
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
    """Run the program and exit with its status. args: the arguments; None for those of the command line."""
    try:
        command_group().main(args=args, prog_name="pase")
    except SystemExit:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _stop_writing()
        raise
    except Exception:  # _Commands.invoke has already mapped the errors that input can cause
        traceback.print_exc()
        typer.echo("Error: this is a defect of pase; please report it with the lines above", err=True)
        sys.exit(OWN_FAULT)
    raise AssertionError("main() of the command line always exits")


if __name__ == "__main__":
    main()
