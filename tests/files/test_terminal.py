"""On a terminal, names from files are text everywhere: brackets stay, and control characters are made visible."""

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

import pase
from pase.errors import PaseError
from pase.files.terminal import console, printable
from pase.plan.table import layer_table
from tests.house.test_documents import ROOT


@given(st.text(max_size=40))
def test_nothing_in_a_line_or_a_cell_commands_the_terminal(name):
    out = io.StringIO()
    table = Table("[bold]head\x1b[2J", title=name)
    table.add_row(name)
    c = console(file=out, width=200)
    c.print(name)
    c.print(table)
    said = out.getvalue()
    assert "[bold]head\N{REPLACEMENT CHARACTER}[2J" in said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_what_is_plain_stays():
    out = io.StringIO()
    console(file=out, width=80).print("w[0] :smile: [red]x[/red]\n\té ü 中")
    assert out.getvalue().splitlines()[0] == "w[0] :smile: [red]x[/red]"
    assert printable("w[0]\n\té ü 中") == "w[0]\n\té ü 中"


def test_nobody_makes_a_terminal_of_his_own():
    found = [
        str(f.relative_to(ROOT))
        for f in (ROOT / "pase").rglob("*.py")
        if "rich.console import Console" in f.read_text(encoding="utf-8")
    ]
    assert found == ["pase/files/terminal.py"]


def test_what_is_piped_is_plain():
    """No line is wrapped, and none ends in blanks."""
    out = io.StringIO()
    table = Table("layer", "moves", box=None)
    table.add_row("a" * 150, "AG 1 MiB " * 20)
    table.add_row("b", "")
    console(file=out).print(table)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 and all(line == line.rstrip() for line in lines)


def test_a_plan_fits_a_narrow_terminal():
    """Each layer has a row, and each figure stays next to its unit, whatever the width."""
    plan = pase.compile("zoo:gpt2?layers=2&batch=16", devices=8, mesh="data=8", baselines=False)
    layers = [n.name for n in plan.nodes if n.op == "matmul"]
    for width in (80, 120, 160):
        out = io.StringIO()
        console(file=out, width=width).print(layer_table(plan, width))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        for name in layers:
            (row,) = [line for line in lines if line.startswith(f"{name} ")]
            assert re.search(r"\d (ms|µs) ", row) and re.search(r"\d [KMG]?i?B\b", row)


def test_no_error_commands_the_terminal():
    assert (
        str(PaseError("op 'Mat\x1b[2Jul'\nhas no rule"))
        == "op 'Mat\N{REPLACEMENT CHARACTER}[2Jul'\nhas no rule"
    )
