"""With the default extras, every test can be collected, and every skipped test has a named need and a command."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.house.test_layering import imports
from tests.house.test_style import parsed
from tests.needs import NEEDS

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def extras(variable: str) -> set[str]:
    (found,) = re.findall(rf"^{variable}\s*\??:?=\s*([\w,]+)$", MAKEFILE, re.M)
    return set(found.split(","))


def packages(extra: set[str]) -> set[str]:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {re.match(r"[\w-]+", line)[0] for e in extra for line in asked[e]}


def test_no_test_needs_what_the_default_extras_lack_to_be_collected():
    """Tests, and the modules of bench that they load, import packages of other extras only inside functions.

    For pase, tests/house/test_layering.py checks this. ``make test`` in a clean clone shows it by collecting every test
    without these packages; this test also works if PyTorch is installed.
    """
    beyond = packages(extras("BESIDES")) - packages(extras("EXTRAS"))
    assert beyond >= {"torch", "onnxscript", "transformers"}
    files = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for folder in ("tests", "bench")
        for f in sorted((ROOT / folder).rglob("*.py"))
    }
    left = [name for name in files if name.startswith("tests.")]
    seen = set(left)
    while left:
        name = left.pop()
        package = files[name].stem == "__init__"
        loaded = {m for m, top, _ in imports(parsed(files[name]), name, package, files) if top}
        assert not beyond & {m.partition(".")[0] for m in loaded}, name
        more = loaded & files.keys() - seen
        seen |= more
        left += more
    assert "bench.cases.plans" in seen


def test_what_not_every_machine_has_is_asked_for_by_a_mark():
    """Tests do not use importorskip for these: its reason fails CI, and it skips only if the package is missing."""
    beyond = packages(extras("BESIDES")) - packages(extras("EXTRAS"))
    asked = rf"importorskip\(\s*[\"'](?:{'|'.join(map(re.escape, sorted(beyond)))})\b"
    assert re.search(asked, 'importorskip("torch")') and not re.search(asked, 'importorskip("onnx")')
    for f in sorted((ROOT / "tests").rglob("*.py")):
        assert f == Path(__file__) or not re.search(asked, f.read_text()), f


def test_what_may_be_skipped_and_the_command_that_runs_it():
    """Each need has a make target that runs its tests."""
    assert set(NEEDS) == {
        "torch",
        "gpu_compiler",
        "minutes",
        "release",
        "corpus",
        "maxtext",
        "root",
        "data",
    }
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    for need in NEEDS.values():
        assert " (" not in need.reason  # the details of a skipped test follow in brackets
        program, target, *_ = need.how.split()
        assert program == "make" and target in targets, need.how


def test_ci_is_the_readmes_command_and_what_that_leaves_out():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    run = [line for line in lines if "make " in line and not line.startswith("#")]
    # The test commands have no variables, as a newcomer types them. The background job's exit status is checked.
    wheel = 'make test-wheel ARGS="--python 3.13 --extras jax" & wheel=$!'
    assert run == ["make test", wheel, "make test-all"] and lines[-1] == 'wait "$wheel"'
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make test\b(?! +\w+=)", readme, re.M)
