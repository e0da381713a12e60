"""The registry class: its errors, the order of its members, and how it finds a package's modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.registry import Registry


def test_a_name_is_given_once() -> None:
    registry: Registry[int] = Registry("thing")
    registry.add("a", 1)
    with pytest.raises(ValueError, match="thing 'a' is registered twice"):
        registry.register("b", "a")(2)
    assert (
        registry["a"] == 1 and "c" not in registry and registry.get("c") is None and registry.get("c", 3) == 3
    )


def test_an_unknown_name_is_told_what_there_is() -> None:
    registry: Registry[int] = Registry("machine")
    with pytest.raises(PaseError, match="no machine 'h200'"):
        registry["h200"]
    registry.add("h100", 1)
    registry.add("tpu", 2)
    with pytest.raises(PaseError, match="no machine 'h10'") as e:
        registry["h10"]
    assert "'h100'" in e.value.what and "h100, tpu" in e.value.fix


def test_members_come_by_rank_then_in_order() -> None:
    registry: Registry[int] = Registry("thing")
    registry.add("last", 0, rank=1)
    registry.add("b", 1)
    registry.add("a", 2)
    assert list(registry.items()) == [("b", 1), ("a", 2), ("last", 0)] and len(registry) == 3
    registry.remove("b")
    assert list(registry) == ["a", "last"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a registry, two modules that register members, and one that must not be imported."""
    folder = tmp_path / "things_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from pase.registry import Registry\n"
        "THINGS = Registry('thing', package='things_of_a_test', prefix='of_')\n"
    )
    for name in ("z", "a"):
        (folder / f"of_{name}.py").write_text(
            f"from things_of_a_test import THINGS\nTHINGS.add('{name}', '{name}')\n"
        )
    (folder / "other.py").write_text("raise AssertionError('not asked for')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "things_of_a_test"
    for module in [m for m in sys.modules if m.startswith("things_of_a_test")]:
        del sys.modules[module]


def test_a_new_file_is_all_that_a_new_member_takes(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "of_new.py").write_text(f"from {package} import THINGS\nTHINGS.add('new', 'new')\n")
    from things_of_a_test import THINGS, of_z  # noqa: F401

    assert list(THINGS) == ["a", "new", "z"]  # although z was imported first


def test_a_file_of_one_name_in_each_folder(package: str, tmp_path: Path) -> None:
    for name, files in (("one", ["member"]), ("two", ["member", "other"]), ("none", ["other"])):
        folder = tmp_path / package / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        for file in files:
            text = (
                f"FOLDERS.add('{name}', 1)" if file == "member" else "raise AssertionError('not asked for')"
            )
            (folder / f"{file}.py").write_text(f"from {package} import FOLDERS\n{text}\n")
    with (tmp_path / package / "__init__.py").open("a") as file:
        file.write(f"FOLDERS = Registry('folder', package='{package}', each='member')\n")
    from things_of_a_test import FOLDERS

    assert list(FOLDERS) == ["one", "two"]


def test_a_module_that_cannot_be_imported_is_an_error_each_time(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "of_broken.py").write_text("import a_module_that_is_nowhere\n")
    from things_of_a_test import THINGS

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
            THINGS["a"]


ADDED = {
    "pase.schedule.policies": """
from pase.schedule.policies.basic import fifo
from pase.schedule.registry import register
register("mine", "as fifo")(fifo)
""",
    "pase.search.methods": """
from pase.search.check import brute_force
from pase.search.registry import register
register("mine", "as brute force")(lambda tables, memory, options: brute_force(tables, memory))
""",
    "pase.baselines": """
from pase.baselines.rules import rule
rule("mine")(lambda graph, devices, machine: iter(()))
""",
}
ASK = """
import sys
import pase.baselines, pase.schedule.policies, pase.search.methods
for package, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.modules[package].__path__.append(folder)
from pase.baselines import names
from pase.schedule import all_policies
from pase.search.registry import SEARCHES
print(*("mine" in x for x in (names(), SEARCHES, all_policies())), list(all_policies())[-1])
"""


def test_a_policy_a_search_and_a_baseline_are_one_file_each(tmp_path: Path) -> None:
    folders = []
    for package, source in ADDED.items():
        folder = tmp_path / package
        folder.mkdir()
        (folder / "of_a_test.py").write_text(source)
        folders += [package, str(folder)]
    run = [sys.executable, "-c", ASK, *folders]
    out = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    ).stdout
    assert out == "True True True ours\n"


def test_a_thread_that_asks_while_another_discovers_waits_for_all(tmp_path, monkeypatch):
    package = tmp_path / "slow_members"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from pase.registry import Registry\nMEMBERS = Registry('member', package='slow_members')\n"
    )
    (package / "one.py").write_text(
        "import time\nfrom slow_members import MEMBERS\ntime.sleep(0.2)\nMEMBERS.add('one', 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    members = importlib.import_module("slow_members").MEMBERS
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: members["one"], range(4))) == [1] * 4
