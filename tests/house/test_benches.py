"""Benches stay in step with what they measure: whatever they import is there, also what they import as they run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHES = sorted(f for f in (ROOT / "bench").rglob("*.py") if f.name != "__init__.py")
OURS = ("pase", "bench", "tests")


def missing(file: Path) -> list[str]:
    """What a file imports from this repository, at its top or inside of functions, and does not get."""
    out = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        if node.module.partition(".")[0] not in OURS:
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                out.append(f"line {node.lineno}: {node.module} has no {name}")
    return out


@pytest.mark.parametrize("file", BENCHES, ids=lambda f: str(f.relative_to(ROOT / "bench")))
def test_what_a_bench_imports_is_there(file):
    assert missing(file) == []
