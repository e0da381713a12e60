"""Options that commands share: fields of CompileOptions become flags, and reports are printed alike."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from pase.commands.options import compile_options, print_json, print_report, strictly
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError


def made(*names: str) -> tuple[typer.Typer, list[tuple[str, CompileOptions, bool]]]:
    """A command with flags for these fields, and what it was called with."""
    calls: list[tuple[str, CompileOptions, bool]] = []

    @compile_options(*names)
    def command(
        model: str, options: CompileOptions, loud: Annotated[bool, typer.Option("--loud")] = False
    ) -> None:
        calls.append((model, options, loud))

    app = typer.Typer()
    app.command()(command)
    return app, calls


def test_flags_are_read_into_the_options() -> None:
    app, calls = made()
    done = CliRunner().invoke(
        app, ["zoo:mlp", "--devices", "8", "--mesh", "2x4", "--loud", "--dim", "batch=64", "--dim", "seq=8"]
    )
    assert done.exit_code == 0, done.output
    ((model, options, loud),) = calls
    assert (model, loud) == ("zoo:mlp", True)
    assert options.devices == 8 and options.dims == {"batch": 64, "seq": 8}


def test_a_command_without_the_flag_sets_the_devices_itself() -> None:
    app, calls = made("machine")
    assert CliRunner().invoke(app, ["zoo:mlp"]).exit_code == 0
    assert calls[0][1] == CompileOptions(devices=1)
    assert CliRunner().invoke(app, ["zoo:mlp", "--devices", "8"]).exit_code == 2


def test_flags_stand_between_arguments_and_the_commands_own() -> None:
    @compile_options("devices", "machine")
    def command(model: str, options: CompileOptions, loud: bool = False) -> None: ...

    assert list(inspect.signature(command).parameters) == ["model", "devices", "machine", "loud"]


def test_every_option_with_a_flag_has_help() -> None:
    assert [
        f.name for f in fields(CompileOptions) if f.metadata["flag"].names and not f.metadata["help"]
    ] == []


def test_pairs_that_are_none_are_refused() -> None:
    app, calls = made()
    done = CliRunner().invoke(app, ["zoo:mlp", "--devices", "8", "--dim", "batch"])
    assert isinstance(done.exception, PaseError) and not calls


@pytest.mark.parametrize(
    ("sound", "strict", "exits"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_only_a_doubtful_plan_under_strict_fails(sound: bool, strict: bool, exits: bool) -> None:
    if exits:
        with pytest.raises(typer.Exit) as e:
            strictly(sound, strict)
        assert e.value.exit_code == 1
    else:
        strictly(sound, strict)


def test_a_report_is_json_or_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_report({"a": 1}, True, lambda r: print("words"))
    assert capsys.readouterr().out == '{"a": 1}\n'
    print_report({"a": 1}, False, lambda r: print("words"))
    assert capsys.readouterr().out == "words\n"
    print_json({"a": [1]})
    assert json.loads(capsys.readouterr().out) == {"a": [1]}
