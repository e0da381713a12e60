"""The command line: exit status, one clear message per error, and commands that are loaded only when they run."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import subprocess
import sys

import pytest

import pase.commands
from pase import __version__, cli
from tests.command import printed

HEAD = """
import json
from typing import Annotated
import typer
from pase.errors import Infeasible, PaseError

"""
COMMANDS = {
    "ok": """def ok(size: Annotated[int, typer.Option(help="How many.")] = 3) -> None:
    '''Do it.

    >>> no doctest, but longer help
    '''
    print(json.dumps({"size": size}))
""",
    "bad": """def bad() -> None:
    raise PaseError("layout.json, line 3: no such axis 'q'; the mesh has data, model")
""",
    "infeasible": """def infeasible() -> None:
    '''Line about infeasible.'''
    raise Infeasible("nothing fits in 1 GiB; the least is 3.2 GiB a device")
""",
    "missing": "def missing() -> None:\n    open('/no/such/layout.json')\n",
    "apart": "def apart(json: bool = False) -> None:\n    raise PaseError('no axis', where='mesh', fix='name one')\n",
    "bare": "def bare() -> None:\n    raise ModuleNotFoundError('no', name='torch.nn')\n",
    "crash": "def crash() -> None:\n    raise RuntimeError('boom')\n",
    "interrupt": "def interrupt() -> None:\n    raise KeyboardInterrupt\n",
    "plans": "import os\n\n\ndef plans() -> None:\n    print(os.environ.get('JAX_PLATFORMS'))\n",
    "steps": "import os\n\nUSES_DEVICES = True\n\n\ndef steps() -> None:\n    print(os.environ.get('JAX_PLATFORMS'))\n",
    "chatty": "def chatty() -> None:\n    for i in range(100_000):\n        print(i)\n",
}


@pytest.fixture
def group(tmp_path, monkeypatch):
    """The program with dummy commands, each in a file of a package that also has an ``options`` module."""
    folder = tmp_path / "dummy_commands"
    folder.mkdir()
    for name, source in {"__init__": "", "options": "later = 1\n", **COMMANDS}.items():
        (folder / f"{name}.py").write_text(HEAD + source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield cli.command_group("dummy_commands")
    for module in [m for m in sys.modules if m.startswith("dummy_commands")]:
        del sys.modules[module]


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


def test_with_json_an_error_is_an_object(group, capsys):
    assert call(group, "apart", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"what": "no axis", "where": "mesh", "fix": "name one", "status": 2}}
    assert err == "Error: mesh: no axis; name one\n"


def test_a_missing_framework_is_no_defect_of_pase(group, capsys):
    assert call(group, "bare") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("Error: this needs torch, which is not installed; pip install")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["okk"], "'okk'. Did you mean 'ok'?"),
        (["ok", "--size", "many"], "Invalid value for '--size'"),
        (["ok", "--colour"], "No such option: --colour"),
        (["options"], "No such command 'options'"),
    ],
)
def test_bad_usage_is_status_2_on_stderr(group, capsys, args, message):
    assert call(group, *args) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_the_list_of_commands_loads_none_of_them(group, capsys):
    assert call(group, "--help") == 0
    text = capsys.readouterr().out
    assert "Line about infeasible." in text and "options" not in text
    assert "pase compile zoo:gpt2 --devices 32 " in text
    assert [m for m in sys.modules if m.startswith("dummy_commands.")] == []


@pytest.mark.parametrize(
    ("command", "given", "has"),
    [("plans", None, "cpu"), ("plans", "cuda", "cuda"), ("steps", None, "None"), ("steps", "cuda", "cuda")],
)
def test_what_only_plans_leaves_devices_alone(group, capsys, monkeypatch, command, given, has):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if given is not None:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    says = logging.getLogger("jax._src.xla_bridge")
    before = says.level
    assert call(group, command) == 0
    assert capsys.readouterr().out == f"{has}\n"
    assert os.environ.get("JAX_PLATFORMS") == given and says.level == before


def test_the_commands_that_use_devices():
    modules = {n: importlib.import_module(f"pase.commands.{n}") for n in cli._names("pase.commands")}
    found = {n for n, m in modules.items() if getattr(m, "USES_DEVICES", False)}
    assert found == {"run", "profile", "calibrate", "doctor"}
    assert all(n in cli.EPILOG for n in found)


def test_no_arguments_print_the_help(group, capsys):
    assert call(group) == 0
    bare = capsys.readouterr().out
    assert call(group, "-h") == 0
    assert capsys.readouterr().out == bare


def test_a_commands_own_help_is_its_docstring(group, capsys):
    assert call(group, "ok", "--help") == 0
    text = capsys.readouterr().out
    assert "Do it." in text and "How many." in text


@pytest.mark.parametrize("name", cli._names("pase.commands"))
def test_help_is_in_users_words(name):
    """Values have no Python types. Arguments are in capitals, and listed as the usage line calls them."""
    text = printed(name, "--help")
    usage, _, rest = text.partition("\n")
    assert not re.search(r"<\w+( range)?>|<list\[|most max_axes", text), text
    for said in usage.partition("[OPTIONS]")[2].split():
        called = said.strip("[]{}").removesuffix(".json")
        assert called == called.upper() and f"\n  {called}" in rest, text


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
    program = "from pase import cli\ncli.PACKAGE = 'dummy_commands'\ncli.main(['chatty'])\n"
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


def test_every_command_has_its_function_and_a_line_of_help():
    names = cli._names("pase.commands")
    assert len(names) >= 16
    for name in names:
        purpose, line = cli._purpose_and_line("pase.commands", name)
        assert purpose in cli.PURPOSES, name
        assert line.endswith(".") and len(line) <= 63, name  # one line of help, uncut
        assert callable(getattr(importlib.import_module(f"pase.commands.{name}"), name))


def test_a_file_without_its_function_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("def whole() -> None: ...\n")
    monkeypatch.setattr(pase.commands, "__path__", [*pase.commands.__path__, str(tmp_path)])
    with pytest.raises(AttributeError, match=r"half\.py has no function 'half'"):
        cli._purpose_and_line("pase.commands", "half")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pase compile zoo:gpt2_x", ["zoo:gpt2_xl"]),
        ("pase compile zoo:mlp --machine 1080", ["1080tix8"]),
        ("pase schedule layout.json --policy ddp,our", ["ddp,ours"]),
    ],
)
def test_completion_knows_models_machines_and_policies(words, offered, monkeypatch, capsys):
    monkeypatch.setenv("_PASE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        cli.command_group().main(args=[], prog_name="pase")
    assert capsys.readouterr().out.split() == offered
