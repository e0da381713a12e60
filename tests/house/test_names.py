"""Each name has one meaning: no two classes or type aliases have the same name, public or private."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.test_style import parsed

ROOT = Path(__file__).parents[2]
ROOMS = ("pase", "bench")
# Names that may be defined twice, each with the reason.
TWICE: dict[str, str] = {}


def types_of(tree: ast.Module) -> Iterator[str]:
    """The names of the classes and type aliases that a module defines, without leading underscores."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target.id):
                yield target.id.lstrip("_")


def named() -> dict[str, list[str]]:
    """Each name with the files that define it."""
    found = defaultdict(list)
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            inside = file.relative_to(ROOT)
            for name in types_of(parsed(file)):
                found[name].append(str(inside))
    return found


def test_no_name_is_given_twice() -> None:
    again = {name: files for name, files in named().items() if len(files) > 1 and name not in TWICE}
    assert not again, f"one meaning a name: {again}"


def test_the_names_that_may_stand_twice_do() -> None:
    assert all(len(named()[name]) > 1 for name in TWICE)


def test_the_check_sees_what_it_is_for() -> None:
    source = (
        "class _Walk: ...\nMove = tuple[int, int]\nplain = 1\nLIMIT = 2\nif True:\n    class Inner: ...\n"
    )
    assert list(types_of(ast.parse(source))) == ["Walk", "Move"]
