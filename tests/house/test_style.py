"""The formatter formats all sources, and the public functions of benches have docstrings."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all tests. Do not change it."""
    return ast.parse(file.read_text(encoding="utf-8"))


def sources(*rooms: str) -> list[Path]:
    """The Python files of these folders."""
    return sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))


ROOMS = ("pase", "bench", "tests", "examples")
NAMED_BY = ("program", "layer", "loss", "transform")
BENCHES = [str(f.relative_to(ROOT)) for f in sources("bench")]


@pytest.mark.parametrize("file", BENCHES)
def test_public_functions_of_a_bench_say_what_they_write(file: str) -> None:
    silent = [
        node.name
        for node in parsed(ROOT / file).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        # The name of a program of the corpus says what it is, and its module says in which library. So do patterns.
        and not any(ast.unparse(d).partition("(")[0] in NAMED_BY for d in node.decorator_list)
    ]
    assert not silent, f"{file}: without docstring: {silent}"


def test_the_formatter_formats_all() -> None:
    """No part of a file is excluded from formatting."""
    kept = ("fmt: " + "skip", "fmt: " + "off")
    found = [
        str(f.relative_to(ROOT)) for f in sources(*ROOMS) if any(k in f.read_text("utf-8") for k in kept)
    ]
    assert not found


def test_sizes_are_printed_in_one_kind_of_unit() -> None:
    """By ``pase.files.quantities``, in binary units: nobody has to compare MB with MiB."""
    decimal = re.compile(r"\} ?[kMGT]B\b(?!/s)")
    found = [
        f"{f.relative_to(ROOT)}:{n}"
        for f in sources("pase")
        for n, line in enumerate(f.read_text("utf-8").splitlines(), 1)
        if decimal.search(line)
    ]
    assert not found
