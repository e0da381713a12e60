"""``Any`` is for values that may really be anything, so few annotations have it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.test_style import ROOT, parsed, sources

MOST = 0.01
"""The largest fraction of annotations in pase that may have ``Any``."""


def uses(tree: ast.AST) -> int:
    """The number of times that a module names ``Any``, without its import."""
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(tree)
    )


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """The annotations of arguments, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation


def test_anys_are_few() -> None:
    trees = {file.relative_to(ROOT): parsed(file) for file in sources("pase")}
    found = {str(file): n for file, tree in trees.items() if (n := uses(tree))}
    most = MOST * sum(1 for tree in trees.values() for _ in annotations(tree))
    assert 0 < sum(found.values()) <= most, f"give these a type of their own: {found}"


def test_the_check_sees_what_it_is_for() -> None:
    source = (
        "from typing import Any\nimport typing\ndef f(x: Any, *y: list[Any]) -> typing.Any: ...\nz: Any = 1\n"
    )
    assert uses(ast.parse(source)) == 4 == len(list(annotations(ast.parse(source))))
