"""The command line's shell: exit status, one clear message, nothing loaded before it is needed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import pase.commands
from pase import __version__, cli

COMMANDS = '''
import json, sys
from typing import Annotated
import typer
from pase.errors import Infeasible, PaseError

def ok(size: Annotated[int, typer.Option(help="How many.")] = 3) -> None:
    """Do it.

    >>> no doctest, but longer help
    """
    print(json.dumps({"size": size}))

def bad() -> None:
    raise PaseError("layout.json, line 3: no such axis 'q'; the mesh has data, model")

def infeasible() -> None:
    raise Infeasible("nothing fits in 1 GiB; the least is 3.2 GiB a device")

def missing() -> None:
    open("/no/such/layout.json")

def crash() -> None:
    raise RuntimeError("boom")

def interrupt() -> None:
    raise KeyboardInterrupt

def chatty() -> None:
    for i in range(100_000):
        print(i)
'''


@pytest.fixture
def group(tmp_path, monkeypatch):
    """The program with dummy commands, one of which has no module."""
    (tmp_path / "dummy_commands.py").write_text(COMMANDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    names = ["ok", "bad", "infeasible", "missing", "crash", "interrupt", "chatty"]
    table = {n: (f"dummy_commands:{n}", f"Line about {n}.") for n in names}
    yield cli.command_group({**table, "later": ("dummy_later:later", "Not there yet.")})
    sys.modules.pop("dummy_commands", None)


def call(group, *args: str) -> int:
    with pytest.raises(SystemExit) as left:
        group.main(args=list(args), prog_name="pase")
    return int(left.value.code or 0)


def program(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pase.cli", *args], capture_output=True, text=True, **kwargs)


def test_a_command_runs_with_its_options(group, capsys):
    assert call(group, "ok", "--size", "7") == 0
    assert capsys.readouterr().out == '{"size": 7}\n'


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("bad", 2, "Error: layout.json, line 3: no such axis 'q'; the mesh has data, model\n"),
        ("infeasible", 1, "Error: nothing fits in 1 GiB; the least is 3.2 GiB a device\n"),
        ("missing", 2, "Error: /no/such/layout.json: No such file or directory\n"),
        ("interrupt", 130, "stopped\n"),
    ],
)
def test_failures_have_one_message_and_their_status(group, capsys, command, status, message):
    assert call(group, command) == status
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["okk"], "No such command 'okk'. Did you mean 'ok'?"),
        (["ok", "--size", "many"], "Invalid value for '--size'"),
        (["ok", "--colour"], "No such option: --colour"),
        (["later"], "No such command 'later'"),
    ],
)
def test_bad_usage_is_status_2_on_stderr(group, capsys, args, message):
    assert call(group, *args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_the_list_of_commands_loads_none_of_them(group, capsys):
    assert call(group, "--help") == 0
    text = capsys.readouterr().out
    assert "Line about infeasible." in text and "later" not in text
    assert "pase compile zoo:gpt2 --devices 32 " in text
    assert "dummy_commands" not in sys.modules


def test_no_arguments_print_the_help(group, capsys):
    assert call(group) == 0
    bare = capsys.readouterr().out
    assert call(group, "-h") == 0
    assert capsys.readouterr().out == bare


def test_a_commands_own_help_is_its_docstring(group, capsys):
    assert call(group, "ok", "--help") == 0
    text = capsys.readouterr().out
    assert "Do it." in text and "How many." in text


def test_an_own_fault_keeps_its_traceback_and_is_no_bad_input(group, capsys, monkeypatch):
    monkeypatch.setattr(cli, "command_group", lambda: group)
    with pytest.raises(SystemExit) as left:
        cli.main(["crash"])
    assert left.value.code == 70
    err = capsys.readouterr().err
    assert "RuntimeError: boom" in err and "please report" in err


def test_the_program_itself():
    version = program("--version")
    assert (version.returncode, version.stdout) == (0, f"pase {__version__}\n")
    bare = program()
    assert bare.returncode == 0 and "Examples:" in bare.stdout and bare.stderr == ""
    unknown = program("frobnicate")
    assert unknown.returncode == 2 and "Traceback" not in unknown.stderr


def test_a_reader_that_leaves_is_no_error(group, tmp_path):
    program = (
        "from pase import cli\n"
        "cli.COMMANDS.clear()\n"
        "cli.COMMANDS['chatty'] = ('dummy_commands:chatty', 'Much.')\n"
        "cli.main(['chatty'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == b"0\n"
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


def test_every_command_with_a_module_has_its_function():
    for name, (target, line) in cli.COMMANDS.items():
        module, _, function = target.partition(":")
        assert line.endswith(".") and len(line) <= 63, name  # one line of help, uncut
        if cli._known(target):
            assert callable(getattr(importlib.import_module(module), function)), target


def test_every_command_is_in_the_table():
    """A file of pase/commands with a function of its own name is a command; the others are helpers."""
    files = {
        file.stem
        for file in Path(pase.commands.__file__).parent.glob("[!_]*.py")
        if any(
            isinstance(n, ast.FunctionDef) and n.name == file.stem for n in ast.parse(file.read_text()).body
        )
    }
    assert len(files) >= 3
    assert files <= {target.partition(":")[0].rpartition(".")[2] for target, _ in cli.COMMANDS.values()}
