"""A function is read on a screen: a limit, and what is longer with its reason.

A function is measured without its signature, its docstring and the further lines of what it raises: a command's options
are a list, and the message of an error is prose, not code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.test_style import ROOMS, ROOT, sources

MOST_LINES_OF_A_FUNCTION = 60

# file:function -> (lines, why). None may grow; one that is short enough again leaves the list.
LONGER = {
    "pase/zoo/cnn_branched.py:inception": (87, "the network's table of layers, in the paper's order"),
    "pase/replay/measurement/clocks_dpro.py:align_dpro": (
        73,
        "the paper's program: constraints, start, objective",
    ),
    "pase/replay/simulation/_twin.py:simulate": (66, "the twin of a compiled kernel, read beside it"),
    "pase/search/elimination/kernels_numba.py:_min_plus_rows": (62, "a compiled loop, unrolled by hand"),
    "pase/schedule/engine_loop.py:loop": (61, "one source that runs as Python and compiled"),
    "bench/schedule/training.py:main": (87, "a bench: its cells, one after another"),
    "bench/audit/mesh_tf.py:compare": (84, "a bench: one step in both frameworks, and the comparison"),
    "bench/schedule/policies.py:main": (72, "a bench: its cells, one after another"),
    "bench/netlab/buckets.py:run_cells": (69, "a program that runs in a process of its own"),
    "bench/published/megatron_gpt.py:gpt": (68, "a model as Megatron writes it"),
    "bench/search/onnx_size.py:blocks": (62, "a model written node by node"),
    "tests/backends/emit/mesh_tf_worker.py:models": (79, "the models of a test, one after another"),
    "tests/frontends/onnx/test_rules.py:test_shards_compute_the_result": (
        77,
        "one check of many kinds of ops",
    ),
    "tests/frontends/onnx/exports.py:pair": (64, "the models of a test, one after another"),
    "tests/hlo/test_cycles.py:program": (61, "a program of HLO written out"),
}


def lengths(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines of the body without its docstring; one line per raise) of each function, inner ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and node.body[1:] else node.body
            assert node.end_lineno is not None
            raised = [n for b in body for n in ast.walk(b) if isinstance(n, ast.Raise)]
            messages = sum((n.end_lineno or n.lineno) - n.lineno for n in raised)
            yield node.name, node.end_lineno - body[0].lineno + 1 - messages


def long_functions() -> dict[str, int]:
    """file:function -> lines, of those above the limit."""
    return {
        f"{file.relative_to(ROOT)}:{name}": lines
        for file in sources(*ROOMS)
        for name, lines in lengths(ast.parse(file.read_text(encoding="utf-8")))
        if lines > MOST_LINES_OF_A_FUNCTION
    }


def test_functions_are_read_on_a_screen() -> None:
    found = long_functions()
    more = {f: n for f, n in found.items() if n > LONGER.get(f, (MOST_LINES_OF_A_FUNCTION, ""))[0]}
    assert not more, f"above {MOST_LINES_OF_A_FUNCTION} lines, or above what is listed; split them: {more}"
    assert not LONGER.keys() - found.keys(), "these are short enough, and need not be listed any more"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f(a,\n      b):\n    """What."""\n    x = 1\n    return x\n', 2),
        ("def f():\n    return 1\n", 1),
    ],
)
def test_a_function_is_measured_without_what_describes_it(source: str, lines: int) -> None:
    assert [n for _, n in lengths(ast.parse(source))] == [lines]
