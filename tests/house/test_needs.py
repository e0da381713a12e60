"""A machine with the default extras alone can load every test, and what it skips has a name and a command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.needs import NEEDS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def extras(variable: str) -> set[str]:
    (found,) = re.findall(rf"^{variable}\s*\??:?=\s*([\w,]+)$", MAKEFILE, re.M)
    return set(found.split(","))


def packages(extra: set[str]) -> set[str]:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {re.match(r"[\w-]+", line)[0] for e in extra for line in asked[e]}


@pytest.mark.torch
def test_every_module_under_tests_imports_with_the_default_extras_alone():
    """In a process of its own, in which what the other extras bring cannot be imported.

    Where they are not installed, pytest has just shown it by collecting this test and all others.
    """
    beyond = packages(extras("BESIDES")) - packages(extras("EXTRAS"))
    assert beyond >= {"torch", "onnxscript", "transformers"}
    modules = sorted(
        ".".join(f.relative_to(ROOT).with_suffix("").parts)
        for f in (ROOT / "tests").rglob("*.py")
        if f.name not in ("__init__.py", "conftest.py")
    )
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(beyond)!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(m for m in {sorted(beyond)!r} if sys.modules[m] is not None))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]


def test_what_not_every_machine_has_is_asked_for_by_a_mark():
    """Not by importorskip, which skips for a reason that fails CI, and only where the package is not installed."""
    beyond = packages(extras("BESIDES")) - packages(extras("EXTRAS"))
    asked = rf"importorskip\(\s*[\"'](?:{'|'.join(map(re.escape, sorted(beyond)))})\b"
    assert re.search(asked, 'importorskip("torch")') and not re.search(asked, 'importorskip("onnx")')
    for f in sorted((ROOT / "tests").rglob("*.py")):
        assert f == Path(__file__) or not re.search(asked, f.read_text()), f


def test_what_may_be_skipped_and_the_command_that_runs_it():
    """PyTorch is CI's second command; other libraries, root, and data that is not ours have targets of their own."""
    assert set(NEEDS) == {"torch", "minutes", "corpus", "root", "data"}
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    for need in NEEDS.values():
        program, target, *_ = need.how.split()
        assert program == "make" and target in targets, need.how


def test_ci_is_the_readmes_command_and_what_that_leaves_out():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    run = [line for line in lines if "make " in line and not line.startswith("#")]
    # No variables in those of the tests: what a newcomer types. What runs beside them has its exit status asked for.
    wheel = 'make test-wheel ARGS="--python 3.13 --extras jax" & wheel=$!'
    assert run == ["make test", wheel, "make test-all"] and lines[-1] == 'wait "$wheel"'
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make test\b(?! +\w+=)", readme, re.M)
