"""Facts are typed values: the core parses text only where it reads text from outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_style import parsed

ROOT = Path(__file__).parents[2]
CORE = ("ir", "ops", "tables", "search", "baselines", "memory", "costmodels", "compiler", "plan")
TAKES_APART = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "split",
    "rsplit",
    "removeprefix",
    "removesuffix",
}
STRIPS = {"strip", "lstrip", "rstrip"}  # without an argument they remove white space, which is not parsing

# file -> the text that it reads or writes. A new line must say which text it is. A fact that one part of pase passes to
# another must not be text: give it a field.
READS_TEXT = {
    "pase/compiler/batch.py": "a model as the user names it: zoo:NAME",
    "pase/compiler/problem/pairs.py": "NAME=VALUE as people type it",
    "pase/compiler/resolve.py": "a model as the user names it: zoo:NAME, MODULE:FUNCTION, a path",
    "pase/ir/functions.py": "the table's own words",
    "pase/ir/maps.py": "an access map as einsum text",
    "pase/ir/parameters.py": "the text form of parameters",
    "pase/ir/places.py": "a Python function's qualified name",
    "pase/ir/text.py": "the IR's text form",
    "pase/ir/types.py": "a framework's dtype names",
    "pase/plan/answer.py": "methods and axes by the names that layout.json has: megatron_8x4, data2",
    "pase/plan/table.py": "a line of its own as a warning",
    "pase/search/instances/read_models.py": "instance files of other solvers: .wcsp, .uai",
    "pase/search/instances/read_mps.py": "instance files of other solvers: .mps",
    "pase/ops/builder.py": "a new node's name beside the last one's",
}


def taken_apart(tree: ast.Module) -> Iterator[str]:
    """Yields ``LINE: call`` for each call of a method that parses text, except numpy's split."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        array = isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "jnp")
        if not array and (node.func.attr in TAKES_APART or (node.func.attr in STRIPS and node.args)):
            yield f"{node.lineno}: {ast.unparse(node)}"


def core_files() -> list[str]:
    return sorted(str(f.relative_to(ROOT)) for room in CORE for f in (ROOT / "pase" / room).rglob("*.py"))


@pytest.mark.parametrize("file", core_files())
def test_no_fact_is_read_out_of_a_name(file: str) -> None:
    found = list(taken_apart(parsed(ROOT / file)))
    if file in READS_TEXT:
        assert found, f"{file} does not parse text any more; remove it from the list"
    else:
        assert not found, f"{file} reads facts out of text; give them a typed field: {found}"


def test_the_check_sees_what_it_is_for() -> None:
    before = "region = next(s for s in op.scope if s.startswith('remat'))\nraw = name.partition('c')[0]"
    assert len(list(taken_apart(ast.parse(before)))) == 2
    assert len(list(taken_apart(ast.parse("use = name.rstrip('0123456789')")))) == 1
    assert not list(taken_apart(ast.parse("held = np.split(x, 3); kind = op.scope[0].kind")))
