"""Instance files: the two JSON formats, and a clear error for each kind of corruption."""

from __future__ import annotations

import gzip
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.compiled import BreakEven
from pase.errors import PaseError
from pase.search import brute_force, solve, verify
from pase.search.elimination import exact
from pase.search.instances.readers import read_instance, write_solution
from pase.search.types import Effort
from tests.needs import SHARED
from tests.search.instances.example import PROBLEM, changed


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_contest_form(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / ("x" + suffix)
    data = json.dumps(PROBLEM).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    tables, memory = read_instance(path)
    assert memory is not None
    assert [c.size for c in tables.node_costs] == [3, 2, 2]
    assert np.isinf(tables.edges[0].cost[1, 1])
    found = solve(tables, memory)
    assert verify(tables, found, memory) == brute_force(tables, memory).cost == 15 + 10 + 40 + 3 + 1
    write_solution(tmp_path / "out.json", found.choice)
    assert json.loads((tmp_path / "out.json").read_text()) == [0, 1, 0]


def write_index(tmp_path: Path, arrays: dict[str, np.ndarray], doc: dict[str, Any]) -> Path:
    np.savez_compressed(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "x.json").write_text(json.dumps(doc))
    return tmp_path / "x.json"


INDEX = {
    "nodes": [{"costs": "a", "name": "conv"}, {"costs": "a"}, {"costs": "b"}],
    "edges": [{"src": 0, "dst": 2, "costs": "m"}, {"src": 1, "dst": 2, "costs": "m"}],
}
ARRAYS = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 0.0, 1.0]), "m": np.arange(6.0).reshape(2, 3)}


def test_index_and_npz_share_equal_arrays(tmp_path: Path) -> None:
    tables, memory = read_instance(write_index(tmp_path, ARRAYS, INDEX))
    assert memory is None
    assert tables.node_costs[0] is tables.node_costs[1]
    assert tables.edges[0].cost is tables.edges[1].cost
    assert tables.edges[0].dst_class is tables.edges[1].dst_class
    assert tables.name(0) == "conv"
    assert solve(tables).cost == brute_force(tables).cost


@pytest.mark.parametrize(
    ("doc", "word"),
    [
        ([1, 2], "IOPDDL"),
        ({}, "IOPDDL"),
        (changed("problem", "nodes", None), "problem.nodes.costs must be a list"),
        (changed("problem", "nodes", "costs", 7), "int '7'"),
        (changed("problem", "nodes", "costs", 0, "x"), "nodes.costs[0] must be a list of numbers"),
        (changed("problem", "nodes", "costs", 0, 1, "x"), "str 'x'"),
        (changed("problem", "nodes", "costs", 0, 1, True), "bool 'True'"),
        (changed("problem", "nodes", "costs", 1, []), "nodes.costs[1] is empty"),
        (changed("problem", "nodes", "costs", 0, [1]), "node 0 has 1 costs"),
        (changed("problem", "nodes", "costs", 0, 0, float("nan")), "NaN"),
        (changed("problem", "nodes", "costs", 0, 0, float("-inf")), "-infinity"),
        (changed("problem", "nodes", "costs", 0, 0, 10**400), "float64"),
        (changed("problem", "nodes", "usages", [[1]]), "3 costs, 1 usages and 3 intervals"),
        (changed("problem", "nodes", "usages", 0, 0, -1), "problem.nodes.usages[0]"),
        (changed("problem", "nodes", "intervals", 1, [1]), "intervals[1]"),
        (changed("problem", "nodes", "intervals", 1, [1, 10**18]), "out of range"),
        (changed("problem", "usage_limit", "much"), "usage_limit"),
        (changed("problem", "usage_limit", -1), "usage_limit"),
        (changed("problem", "edges", {"nodes": []}), "problem.edges.costs"),
        (changed("problem", "edges", "nodes", [[0, 1]]), "1 pairs of nodes"),
        (changed("problem", "edges", "nodes", 0, [0, 9]), "outside 0 … 2"),
        (changed("problem", "edges", "nodes", 0, [0]), "a pair of nodes"),
        (changed("problem", "edges", "costs", 0, [1, 2]), "3 × 2"),
    ],
)
def test_corrupt_contest_files(tmp_path: Path, doc: object, word: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(doc))
    with pytest.raises(PaseError) as e:
        read_instance(path)
    assert e.value.where == str(path) and word in e.value.what


def test_unreadable_files(tmp_path: Path) -> None:
    cases = {
        "cut.json.gz": (gzip.compress(json.dumps(PROBLEM).encode())[:-20], "gzip"),
        "bad.json.gz": (b"\x1f\x8b" + b"junk" * 9, "gzip"),
        "cut.json": (json.dumps(PROBLEM).encode()[:99], "line 1"),
        "empty.json": (b"", "line 1, column 1"),
        "bytes.json": (b'{"problem": "\xff\xfe"}', "byte"),
        "deep.json": (b"[" * 100_000, "nested"),
    }
    for name, (data, word) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PaseError, match=word):
            read_instance(tmp_path / name)
    with pytest.raises(PaseError, match="no such file") as e:
        read_instance(tmp_path / "none.json")
    assert e.value.where == str(tmp_path / "none.json")
    with pytest.raises(PaseError, match="folder"):
        read_instance(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "doc", "word"),
    [
        ({"a": ARRAYS["a"], "m": ARRAYS["m"]}, INDEX, "array 'b'"),
        (ARRAYS | {"m": np.zeros((2, 2))}, INDEX, "(2, 2) in x.npz"),
        (ARRAYS | {"a": np.array(["x", "y"])}, INDEX, "numbers"),
        (ARRAYS | {"a": np.array([{}, {}], dtype=object)}, INDEX, "numbers"),
        (ARRAYS | {"a": np.zeros(0)}, INDEX, "array 'a' is empty"),
        (ARRAYS | {"a": np.array([np.nan, 1.0])}, INDEX, "NaN"),
        (ARRAYS, INDEX | {"nodes": [{"costs": 5}]}, "nodes[0].costs"),
        (ARRAYS, INDEX | {"edges": [{"src": 0, "dst": 0, "costs": "m"}]}, "node 0 to itself"),
        (ARRAYS, INDEX | {"edges": [{"src": 0, "dst": 5, "costs": "m"}]}, "0 and 5"),
        (ARRAYS, INDEX | {"edges": [{"src": 0, "dst": 1, "costs": "a"}]}, "array 'a'"),
        (ARRAYS, INDEX | {"edges": 3}, "index.edges"),
    ],
)
def test_corrupt_indices(tmp_path: Path, arrays: dict[str, Any], doc: dict[str, Any], word: str) -> None:
    with pytest.raises(PaseError) as e:
        read_instance(write_index(tmp_path, arrays, doc))
    assert word in e.value.what and e.value.where.startswith(str(tmp_path / "x."))


def test_corrupt_archives(tmp_path: Path) -> None:
    path = write_index(tmp_path, ARRAYS, INDEX)
    whole = (tmp_path / "x.npz").read_bytes()
    locked = bytearray(whole)
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = whole.find(header)
        while at >= 0:
            locked[at + flags] |= 1
            at = whole.find(header, at + 1)
    damaged = "damaged or encrypted"
    for data, word in ((whole[:100], damaged), (b"", damaged), (bytes(locked), "password")):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(PaseError, match=word):
            read_instance(path)
    (tmp_path / "x.npz").unlink()
    with pytest.raises(PaseError, match="no such file") as e:
        read_instance(path)
    assert e.value.where == str(tmp_path / "x.npz") and e.value.fix
    # A header that claims a terabyte, and one that is a pickle, are refused before memory is allocated.
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,), }".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    for data, word in ((huge, "137438953472"), (pickle.dumps({}), "damaged")):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("a.npy", data)
        with pytest.raises(PaseError, match=word):
            read_instance(path)


@pytest.mark.data("pase_instances")
@pytest.mark.parametrize(
    "path", sorted((SHARED / "pase_instances").glob("*.json")) or [SHARED], ids=lambda p: p.stem
)
def test_every_pase_instance_exactly(path: Path) -> None:
    tables, _ = read_instance(path)
    found = solve(tables)
    assert verify(tables, found) == json.loads(path.read_text())["exact"]["optimum"]
    assert found.optimal


@pytest.mark.release
@pytest.mark.data("iopddl")
def test_contest_instance_g_is_proven() -> None:
    tables, memory = read_instance(SHARED / "iopddl" / "asplos-2025-iopddl-G.json.gz")
    found = solve(tables, memory, effort=Effort(time_limit=120))
    assert verify(tables, found, memory) == 217_039
    assert found.optimal


def test_kernels_are_numpys_until_numba_is_worth_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "KERNELS", BreakEven(load_s=1.0))
    work = 0.3 / exact._OPERATION_S
    names = [exact.kernels_for("numba", n).__name__ for n in (work, work, work, work, 0.0)]
    assert [n.rpartition("_")[2] for n in names] == ["numpy", "numpy", "numpy", "numba", "numba"]


def test_a_bomb_is_refused_before_it_fills_memory(tmp_path):
    """256 MiB of blanks in 260 KB: more than 200 times its own size, and more than any small file may unpack to."""
    path = tmp_path / "bomb.json"
    path.write_bytes(gzip.compress(b" " * (1 << 20)) * 256)
    with pytest.raises(PaseError) as e:
        read_instance(path)
    assert "64 MiB" in e.value.what and e.value.fix
