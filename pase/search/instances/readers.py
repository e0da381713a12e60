"""Instances from files: the IOPDDL contest's JSON, an index .json with its .npz, and the text of other solvers.

Files come from strangers: sizes are bounded before memory is taken, nothing is unpickled, and whatever is
wrong becomes one PaseError that names the file and the place in it.
"""

from __future__ import annotations

import gzip
import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.files.codec import parse_json
from pase.files.json_values import JsonObject
from pase.search.instances.read_models import TEXT_READERS
from pase.search.instances.read_mps import read_mps
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables, EdgeTable

__all__ = ["read_instance", "write_solution"]

MAX_BYTES = 2 << 30  # of a file once unpacked
_UNPACKED_BYTES, _RATIO = (
    64 << 20,
    200,
)  # what any gzip may hold, and what more for each of its own bytes: else a bomb
MAX_NODES = 10_000_000
MAX_ENTRIES = 200_000_000  # numbers in all tables together
FORBIDDEN = 1e18  # the contest writes "not allowed" as 10^18


def read_instance(path: Path) -> tuple[CostTables, MemoryProfile | None]:
    """Tables and, where the instance has one, its memory limit.

    path: ``.json`` in the IOPDDL form, an index ``.json`` beside an ``.npz`` of the same stem, or ``.wcsp``, ``.uai``
    or ``.mps``; all but the index may be gzip'ed. Of the last three, the first nodes are the file's variables (of a
    program: groups of them, which the names list). Raises PaseError for whatever cannot be read, Infeasible if a row
    of a program cannot be met.
    """
    path = Path(path)
    form = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if form == ".mps":
        return read_mps(path, _text(path))
    if form in TEXT_READERS:
        return TEXT_READERS[form](path, _text(path)), None
    doc = parse_json(_read_bytes(path), str(path))
    if isinstance(doc, dict) and isinstance(doc.get("problem"), dict):
        return _iopddl(path, doc["problem"])
    if isinstance(doc, dict) and isinstance(doc.get("nodes"), list):
        return _indexed(path, doc), None
    raise PaseError(
        f"{path}: neither an IOPDDL instance (an object with 'problem') nor an index (an object with a "
        "'nodes' list and an .npz beside it); other forms are told by .wcsp, .uai and .mps"
    )


def write_solution(path: Path, choice: np.ndarray) -> None:
    """The contest's form: a JSON list with one config index per node."""
    write_atomically(path, json.dumps([int(k) for k in choice]) + "\n")


def _text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as err:
        raise PaseError(f"{path}: not text in UTF-8 (byte {err.start})") from None


def _read_bytes(path: Path) -> bytes:
    """The file, unpacked if it is gzip'ed."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        most = min(MAX_BYTES, max(_UNPACKED_BYTES, _RATIO * path.stat().st_size)) if packed else MAX_BYTES
        with gzip.open(path, "rb") if packed else open(path, "rb") as f:
            data = f.read(most + 1)
    except FileNotFoundError:
        raise PaseError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise PaseError(f"{path}: a folder, not an instance file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as err:
        raise PaseError(f"{path}: the gzip data is damaged ({err}); fetch the file again") from None
    except OSError as err:
        raise PaseError(f"{path}: cannot be read ({err.strerror or err})") from None
    if len(data) > most:
        hint = "; unpack it first if you trust it" if packed else ""
        raise PaseError(f"{path}: more than {most >> 20} MiB once unpacked; refused{hint}")
    return data


def _list(path: Path, holder: Any, key: str, where: str) -> list[Any]:
    got = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(got, list):
        raise PaseError(f"{path}: {where}.{key} must be a list, found {_kind(got)}")
    return got


def _kind(x: object) -> str:
    return "nothing" if x is None else f"{type(x).__name__} {str(x)[:40]!r}"


def _numbers(path: Path, values: object, where: str) -> np.ndarray:
    """float64 vector; numbers of 1e18 and above become inf. NaN, text and negative infinity are refused."""
    if not isinstance(values, list):
        raise PaseError(f"{path}: {where} must be a list of numbers, found {_kind(values)}")
    if not all(type(x) in (int, float) for x in values):
        bad = next(x for x in values if type(x) not in (int, float))
        raise PaseError(f"{path}: {where} holds {_kind(bad)}, which is not a number")
    try:
        a = np.array(values, dtype=np.float64)
    except OverflowError:
        raise PaseError(f"{path}: {where} holds a number beyond float64") from None
    return _usable(path, a, where)


def _usable(path: Path, a: np.ndarray, where: str) -> np.ndarray:
    if np.isnan(a).any():
        raise PaseError(f"{path}: {where} holds NaN; a cost is a number, or 1e18 and above for 'forbidden'")
    if np.isneginf(a).any():
        raise PaseError(f"{path}: {where} holds -infinity; no sum of costs would mean anything")
    return np.where(a >= FORBIDDEN, np.inf, a)


def _iopddl(path: Path, problem: JsonObject) -> tuple[CostTables, MemoryProfile]:
    nodes = problem.get("nodes")
    costs = _list(path, nodes, "costs", "problem.nodes")
    usages = _list(path, nodes, "usages", "problem.nodes")
    intervals = _list(path, nodes, "intervals", "problem.nodes")
    n = len(costs)
    if n > MAX_NODES:
        raise PaseError(f"{path}: {n} nodes; at most {MAX_NODES} are read")
    if len(usages) != n or len(intervals) != n:
        raise PaseError(
            f"{path}: problem.nodes has {n} costs, {len(usages)} usages, {len(intervals)} intervals; "
            "each node needs one of each"
        )
    both = [_iopddl_node(path, v, costs[v], usages[v]) for v in range(n)]
    node_costs, held = [c for c, _ in both], [u for _, u in both]
    span = np.array([_iopddl_interval(path, v, pair) for v, pair in enumerate(intervals)], np.int64)
    limit = problem.get("usage_limit")
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not float(limit) >= 0:
        raise PaseError(f"{path}: problem.usage_limit must be a number of bytes, found {_kind(limit)}")
    edges = _iopddl_edges(path, problem.get("edges"), node_costs)
    start, stop = _dense_points(span.reshape(n, 2))
    profile = MemoryProfile(bytes=tuple(held), start=start, stop=stop, limit_bytes=float(limit))
    return CostTables(node_costs=tuple(node_costs), edges=edges), profile


def _iopddl_node(path: Path, v: int, costs: Any, usages: Any) -> tuple[np.ndarray, np.ndarray]:
    """A node's costs and bytes, one for each of its strategies."""
    c = _numbers(path, costs, f"problem.nodes.costs[{v}]")
    u = _numbers(path, usages, f"problem.nodes.usages[{v}]")
    if not c.size:
        raise PaseError(f"{path}: problem.nodes.costs[{v}] is empty; a node needs at least one strategy")
    if c.size != u.size:
        raise PaseError(f"{path}: node {v} has {c.size} costs and {u.size} usages")
    if (u < 0).any():
        raise PaseError(f"{path}: problem.nodes.usages[{v}] holds a negative number of bytes")
    return c, u


def _iopddl_interval(path: Path, v: int, pair: Any) -> list[int]:
    if not (isinstance(pair, list) and len(pair) == 2 and all(type(t) is int for t in pair)):
        raise PaseError(f"{path}: problem.nodes.intervals[{v}] must be [start, stop], found {_kind(pair)}")
    if not 0 <= pair[0] <= 1 << 40 or not 0 <= pair[1] <= 1 << 40:
        raise PaseError(f"{path}: problem.nodes.intervals[{v}] = {pair} is out of range")
    return pair


def _iopddl_edges(path: Path, edges: Any, node_costs: list[np.ndarray]) -> tuple[EdgeTable, ...]:
    """The edges between two nodes; what an edge from a node to itself costs is added to that node's costs."""
    pairs = _list(path, edges, "nodes", "problem.edges")
    matrices = _list(path, edges, "costs", "problem.edges")
    if len(pairs) != len(matrices):
        raise PaseError(f"{path}: problem.edges has {len(pairs)} pairs of nodes and {len(matrices)} matrices")
    n, entries = len(node_costs), 0
    iota: dict[int, np.ndarray] = {}
    tables = []
    for i, (pair, flat) in enumerate(zip(pairs, matrices, strict=True)):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(v) is int for v in pair)):
            raise PaseError(f"{path}: problem.edges.nodes[{i}] must be a pair of nodes, found {_kind(pair)}")
        a, b = pair
        if not (0 <= a < n and 0 <= b < n):
            raise PaseError(f"{path}: problem.edges.nodes[{i}] = [{a}, {b}] names a node outside 0 … {n - 1}")
        m = _numbers(path, flat, f"problem.edges.costs[{i}]")
        ka, kb = node_costs[a].size, node_costs[b].size
        if m.size != ka * kb:
            raise PaseError(f"{path}: problem.edges.costs[{i}] has {m.size} numbers; {ka} × {kb} are needed")
        entries += m.size
        if entries > MAX_ENTRIES:
            raise PaseError(f"{path}: more than {MAX_ENTRIES} edge costs; refused")
        if a == b:  # both ends choose alike: the diagonal is a node cost
            node_costs[a] = node_costs[a] + m.reshape(ka, ka).diagonal()
            continue
        for k in (ka, kb):
            if k not in iota:
                iota[k] = np.arange(k, dtype=np.int32)
        tables.append(EdgeTable(src=a, dst=b, cost=m.reshape(ka, kb), src_class=iota[ka], dst_class=iota[kb]))
    return tuple(tables)


def _dense_points(span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The intervals over the numbers of the points at which some interval starts.

    Usage only rises where an interval starts; all other points are implied, however long the intervals.
    """
    live = span[:, 1] > span[:, 0]
    points = np.unique(span[live, 0])
    start = np.searchsorted(points, span[:, 0])
    stop = np.searchsorted(points, span[:, 1])
    start[~live] = stop[~live] = 0
    return start, stop


def _indexed(path: Path, doc: JsonObject) -> CostTables:
    arrays_path = path.with_suffix(".npz")
    nodes, edges = _list(path, doc, "nodes", "index"), _list(path, doc, "edges", "index")
    wanted: dict[str, int] = {}  # array name -> dimensions
    for where, rows, ndim in (("nodes", nodes, 1), ("edges", edges, 2)):
        for i, row in enumerate(rows):
            key = row.get("costs") if isinstance(row, dict) else None
            if not isinstance(key, str):
                raise PaseError(f"{path}: {where}[{i}].costs must name an array, found {_kind(key)}")
            if wanted.setdefault(key, ndim) != ndim:
                raise PaseError(f"{path}: array '{key}' serves both as a vector and as a matrix")
    arrays = _read_npz(arrays_path, wanted)
    node_costs = tuple(arrays[row["costs"]] for row in nodes)
    iota = {c.size: np.arange(c.size, dtype=np.int32) for c in node_costs}
    tables = []
    for i, row in enumerate(edges):
        a, b = row.get("src"), row.get("dst")
        if type(a) is not int or type(b) is not int or not (0 <= a < len(nodes) and 0 <= b < len(nodes)):
            raise PaseError(f"{path}: edges[{i}] joins {a!r} and {b!r}; there are {len(nodes)} nodes")
        if a == b:
            raise PaseError(f"{path}: edges[{i}] joins node {a} to itself; add its cost to the node")
        cost, shape = arrays[row["costs"]], (node_costs[a].size, node_costs[b].size)
        if cost.shape != shape:
            raise PaseError(f"{path}: edges[{i}] is {cost.shape} in {arrays_path.name}; {shape} is needed")
        tables.append(EdgeTable(src=a, dst=b, cost=cost, src_class=iota[shape[0]], dst_class=iota[shape[1]]))
    names = tuple(str(row.get("name", v)) for v, row in enumerate(nodes))
    return CostTables(node_costs=node_costs, edges=tuple(tables), names=names)


def _read_npz(path: Path, wanted: dict[str, int]) -> dict[str, np.ndarray]:
    """The named arrays as float64, equal names as one object."""
    out: dict[str, np.ndarray] = {}
    entries = 0
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            for key, ndim in wanted.items():
                member = key + ".npy"
                if member not in sizes:
                    raise PaseError(f"{path}: array '{key}', which the index names, is missing")
                with archive.open(member) as f:
                    version = np.lib.format.read_magic(f)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(f)
                if len(shape) != ndim or dtype.kind not in "iuf":
                    raise PaseError(f"{path}: array '{key}' is {dtype} {shape}; {ndim}-d numbers are needed")
                count = math.prod(shape)
                entries += count
                if entries > MAX_ENTRIES or count * dtype.itemsize > sizes[member]:
                    raise PaseError(
                        f"{path}: array '{key}' claims {count} numbers, more than it holds or we read"
                    )
                if not count:
                    raise PaseError(f"{path}: array '{key}' is empty; a node needs at least one config")
                with archive.open(member) as f:
                    a = np.lib.format.read_array(f, allow_pickle=False)
                out[key] = _usable(path, np.ascontiguousarray(a, dtype=np.float64), f"array '{key}'")
    except FileNotFoundError:
        raise PaseError(f"{path}: no such file; the index needs its .npz beside it") from None
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as err:
        raise PaseError(
            f"{path}: the archive is damaged or encrypted ({err}); fetch the file again"
        ) from None
    except OSError as err:
        raise PaseError(f"{path}: cannot be read ({err.strerror or err})") from None
    except PaseError:
        raise
    except (ValueError, SyntaxError) as err:  # numpy's words for a header that is not one
        raise PaseError(f"{path}: an array is damaged ({err})") from None
    return out
