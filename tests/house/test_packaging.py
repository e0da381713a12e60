"""The wheel has pase's packages and their data and nothing else, and requirements and pins are consistent."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pase.errors import DISTRIBUTION
from tests.house.test_style import parsed

ROOT = Path(__file__).parents[2]
LINKED = ("frontends", "backends", "costmodels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources because setuptools leaves a build folder."""
    source = tmp_path_factory.mktemp("source")
    skipped = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    shutil.copytree(ROOT / "pase", source / "pase", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    built = subprocess.run([*pip, "-w", str(out), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_has_the_name_that_messages_use(wheel):
    assert wheel.name.partition("-")[0].replace("_", "-") == DISTRIBUTION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION and list(project["scripts"]) == ["pase"]


def test_the_wheel_holds_every_module_and_data_file(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in packed}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"pase"}
    wanted = set()
    for pattern in ("*.py", "*.toml", "*.json", "py.typed"):
        wanted |= {
            str(p.relative_to(ROOT)) for p in (ROOT / "pase").rglob(pattern) if "__pycache__" not in p.parts
        }
    assert len(wanted) > 30
    assert wanted <= packed, f"left out of the wheel: {sorted(wanted - packed)}"
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_the_wheel_imports_from_a_folder_of_its_own(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pase, pase.frontends, pase.backends, pase.costmodels, pase.backends.audit.xla, pase.cli\n"
        "modules = pase, pase.frontends, pase.backends, pase.costmodels, pase.backends.audit.xla, pase.cli\n"
        "print('\\n'.join(m.__file__ for m in modules))\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=elsewhere
    )
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert len(files) == 6 and all(Path(f).is_relative_to(tmp_path) for f in files), files


@pytest.mark.parametrize("name", LINKED)
def test_a_bare_import_of_a_top_level_folder_is_refused(name):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    wanted = f"import pase.{name}, not {name}" if (ROOT / name).exists() else "No module named"
    assert wanted in done.stderr


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative(name):
    """If the checkout has links, they are relative. An archive without links works too."""
    link = ROOT / name
    assert not link.exists() or (link.is_symlink() and str(link.readlink()) == f"pase/{name}")
    assert not (ROOT / "pase" / name).is_symlink()


def test_folders_of_tests_are_packages():
    """Otherwise pytest fails if two files in different folders have the same name."""
    folders = {p.parent for p in (ROOT / "tests").rglob("test_*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_make_tells_what_it_can_do():
    makefile = (ROOT / "Makefile").read_text()
    told = subprocess.run(
        ["make", "--no-print-directory", "help"], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.M)
    assert targets is not None
    assert [line.split()[1] for line in told.splitlines()] == targets[1].split()


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def canonical(requirement: str) -> str:
    """The name of the required package in the normalised form of package indexes."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-corpus.txt"])
def test_constraints_are_plain_pins_of_all_that_is_asked_for(file: str) -> None:
    for line in (ROOT / file).read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"]]
    extras = project["project"]["optional-dependencies"]
    if file == "constraints.txt":
        asked += project["build-system"]["requires"]
        asked += [a for name, extra in extras.items() if name != "corpus" for a in extra]
    else:  # libraries that only the bench of programs needs, in a separate environment
        asked += [a for name in ("jax", "dev", "corpus") for a in extras[name]]
    assert {canonical(a) for a in asked} <= {canonical(n) for n in pins(file)}


def test_the_corpus_s_pins_satisfy_what_is_asked_for() -> None:
    """A library of the corpus may need another version than the pin in constraints.txt."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    have = {canonical(n): v for n, v in pins("constraints-corpus.txt").items()}
    for asked in (Requirement(a) for name in ("jax", "dev", "corpus") for a in extras[name]):
        assert asked.specifier.contains(have[canonical(asked.name)], prereleases=True), asked


def test_what_is_imported_is_asked_for():
    """A package that is only a dependency of another one may disappear."""
    owners = packages_distributions()
    imported = set()
    for folder in ("pase", "tests", "bench"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.Import):
                    imported |= {a.name.split(".")[0] for a in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    ours = {"pase", "tests"}
    outside = {
        canonical(d) for name in imported - ours - sys.stdlib_module_names for d in owners.get(name, [])
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(d for e in project["optional-dependencies"].values() for d in e)]
    # jax installs the matching jaxlib, and TensorFlow the matching Keras. google.* belongs to several packages.
    assert outside - {canonical(a) for a in asked} <= {"jaxlib", "keras", "googleapis-common-protos"}


def test_this_environment_is_the_pinned_one():
    from importlib.metadata import PackageNotFoundError, version

    wrong = {}
    for name, pinned in pins().items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # a package of an extra that is not installed
        if found.partition("+")[0] != pinned:  # suffixes such as "+cpu" are the kind of build
            wrong[name] = f"{found}, pinned {pinned}"
    assert not wrong


def test_no_file_names_a_package_index():
    names = (
        "constraints.txt",
        "constraints-corpus.txt",
        "pyproject.toml",
        "Makefile",
        ".ci/run",
        ".pre-commit-config.yaml",
    )
    for name in names:
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|file://|--index|--find-links|index-url", text), name
