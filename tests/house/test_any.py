"""``Any`` is for values that truly may be anything; how many annotations have it can only sink."""

from __future__ import annotations

import ast

import pytest

from tests.house.test_style import ROOT, sources

# package -> the most uses of typing.Any that its code may have. Whoever removes some lowers the number.
MOST = {"pase": 155}
SLACK = 5  # how far a count may lie below its ceiling before the ceiling has to follow


def uses(tree: ast.AST) -> int:
    """How often a module names ``Any``, its import left out."""
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("package", MOST)
def test_anys_are_few(package: str) -> None:
    found = {
        str(file.relative_to(ROOT)): n
        for file in sources(package)
        if (n := uses(ast.parse(file.read_text(encoding="utf-8"))))
    }
    total = sum(found.values())
    assert total <= MOST[package], f"{total} uses of Any; give these a type of their own: {found}"
    assert total > MOST[package] - SLACK or not total, f"only {total} are left: lower the number in this file"


def test_the_check_sees_what_it_is_for() -> None:
    source = (
        "from typing import Any\nimport typing\ndef f(x: Any, *y: list[Any]) -> typing.Any: ...\nz: Any = 1\n"
    )
    assert uses(ast.parse(source)) == 4
