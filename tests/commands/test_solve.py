"""``pase solve``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import typer
from typer.testing import CliRunner

from pase.commands.solve import _since_start
from pase.commands.solve import solve as solve_command
from pase.errors import Infeasible
from tests.search.instances.example import PROBLEM, changed


def test_what_the_program_has_done_before_counts() -> None:
    before = time.process_time()
    age = _since_start()
    assert age >= before and age <= _since_start()


app = typer.Typer()
app.command()(solve_command)


def test_command_prints_one_json_object_and_writes_the_choice(tmp_path: Path) -> None:
    path, out = tmp_path / "x.json", tmp_path / "out.json"
    path.write_text(json.dumps(PROBLEM))
    result = CliRunner().invoke(app, [str(path), "--json", "-o", str(out)])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["cost"] == answer["bound"] == 69
    assert answer["optimal"] is True and answer["feasible"] is True
    assert answer["nodes"] == 3 and answer["edges"] == 2 and answer["seconds"] >= 0
    assert json.loads(out.read_text()) == [0, 1, 0]


def test_command_in_words(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(PROBLEM))
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 0
    assert "cost 69   optimal, proven by" in result.stdout


def test_command_on_an_impossible_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(changed("problem", "usage_limit", 5)))
    result = CliRunner().invoke(app, [str(path), "--json"])
    assert isinstance(result.exception, Infeasible)
    assert json.loads(result.stdout)["feasible"] is False


def test_a_small_instance_is_solved_without_loading_numba(tmp_path: Path) -> None:
    """A cold start is mostly imports, so a small instance does not load modules that it does not need."""
    path = tmp_path / "small.json"
    path.write_text(json.dumps(changed("problem", "usage_limit", 1000)))
    heavy = ["numba", "scipy", "rich", "sympy", "networkx", "highspy", "jax", "tensorflow", "torch"]
    program = (
        "import sys\nfrom pase.cli import main\n"
        f"try: main(['solve', {str(path)!r}])\n"
        f"except SystemExit as e: print(e.code, sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("cost ") and done.stdout.splitlines()[-1] == "0 []"
