"""A function has at most eight parameters: what travels together is a type that means something.

The command line's options are a list, and so are the settings of a model of the zoo. A function that has more for
another reason is listed with that reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.house.test_style import ROOMS, ROOT, parsed, sources

MOST = 8
LISTS = ("pase/commands/", "pase/zoo/", "pase/cli.py")

# file:function -> the reason why it has more. An entry that is not needed any more must be removed.
MORE = {
    "pase/frontends/torch/written.py:_recurrent": "PyTorch passes these by their names in the op's schema",
    "pase/frontends/torch/written.py:_in_bags": "PyTorch passes these by their names in the op's schema",
    "pase/replay/traces/builder.py:add": "the columns of a timeline, one by one: it runs for every event of a trace",
}


def counts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields (name, number of parameters without self) of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            yield node.name, len(names) - (names[:1] in (["self"], ["cls"]))


def test_the_count_leaves_out_self() -> None:
    assert dict(counts(ast.parse("def f(a, /, b, *c, d=1, **e): ...\nclass A:\n def g(self, x): ..."))) == {
        "f": 3,
        "g": 1,
    }


def test_functions_have_few_parameters() -> None:
    many = {
        f"{path.relative_to(ROOT)}:{name}": n
        for path in sources(*ROOMS)
        if (file := str(path.relative_to(ROOT))).startswith("pase/") and not file.startswith(LISTS)
        for name, n in counts(parsed(path))
        if n > MOST
    }
    more = {k: n for k, n in many.items() if k not in MORE}
    assert not more, f"group what travels together into a type: {more}"
    assert not MORE.keys() - many.keys(), f"no longer needed: {sorted(MORE.keys() - many.keys())}"
