"""A function must fit on a screen. Longer functions are listed with the reason.

A function is measured without its signature, its docstring, and all but the first line of each raise, because a
command's options are a list, and the message of an error is prose.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.test_style import ROOMS, ROOT, parsed, sources

MOST_LINES_OF_A_FUNCTION = 60

# file:function -> the reason why it may be longer. An entry that is not needed any more must be removed.
LONGER = {
    "pase/zoo/cnn_branched.py:inception": "the network's table of layers, in the paper's order",
    "pase/replay/measurement/clocks_dpro.py:align_dpro": "the paper's program: constraints, start, objective",
    "tests/replay/simulation/twin.py:simulate": "the twin of a compiled kernel, read beside it",
    "bench/audit/mesh_tf.py:compare": "a bench: one step in both frameworks, and the comparison",
    "bench/netlab/buckets.py:run_cells": "a program that runs in a process of its own",
    "bench/published/megatron_gpt.py:gpt": "a model as Megatron writes it",
    "bench/search/onnx_size.py:blocks": "a model written node by node",
    "tests/backends/mesh_tf/worker.py:models": "the models of a test, one after another",
    "tests/frontends/onnx/test_rules.py:test_shards_compute_the_result": "one check of many kinds of ops",
    "tests/frontends/onnx/exports.py:pair": "the models of a test, one after another",
    "tests/hlo/test_cycles.py:program": "a program of HLO written out",
}


def lengths(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields (name, lines of the body) of each function, including inner ones. A raise counts as one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and node.body[1:] else node.body
            assert node.end_lineno is not None
            raised = [n for b in body for n in ast.walk(b) if isinstance(n, ast.Raise)]
            messages = sum((n.end_lineno or n.lineno) - n.lineno for n in raised)
            yield node.name, node.end_lineno - body[0].lineno + 1 - messages


def long_functions() -> dict[str, int]:
    """file:function -> lines, for functions that are longer than the limit."""
    return {
        f"{file.relative_to(ROOT)}:{name}": lines
        for file in sources(*ROOMS)
        for name, lines in lengths(parsed(file))
        if lines > MOST_LINES_OF_A_FUNCTION
    }


def test_functions_are_read_on_a_screen() -> None:
    found = long_functions()
    more = {f: n for f, n in found.items() if f not in LONGER}
    assert not more, f"longer than {MOST_LINES_OF_A_FUNCTION} lines; split them: {more}"
    assert not LONGER.keys() - found.keys(), "these are short enough and must be removed from the list"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f(a,\n      b):\n    """What."""\n    x = 1\n    return x\n', 2),
        ("def f():\n    return 1\n", 1),
    ],
)
def test_a_function_is_measured_without_what_describes_it(source: str, lines: int) -> None:
    assert [n for _, n in lengths(ast.parse(source))] == [lines]
