"""Reads instances from files: the IOPDDL contest's JSON, an index .json with its .npz, and text of other solvers.

Files are untrusted: sizes are checked before memory is allocated, nothing is unpickled, and every fault becomes a
PaseError that names the file and the place in it.
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

MAX_BYTES = 2 << 30  # of an unpacked file
# A gzip file may unpack to the first number of bytes or, if that is more, to the second number of times its own size.
# Beyond that, it is treated as a decompression bomb.
_UNPACKED_BYTES, _RATIO = 64 << 20, 200
MAX_NODES = 10_000_000
MAX_ENTRIES = 200_000_000  # the most numbers in all tables together
FORBIDDEN = 1e18  # the contest writes "not allowed" as 10^18


def read_instance(path: Path) -> tuple[CostTables, MemoryProfile | None]:
    """Reads an instance: its tables and, if it has one, its memory limit.

    path: a ``.json`` in the IOPDDL format, an index ``.json`` next to an ``.npz`` of the same stem, or a ``.wcsp``,
    ``.uai`` or ``.mps`` file; all but the index may be gzip-compressed. For the last three formats, the first nodes are
    the file's variables (for a program, groups of variables, which the names list). Raises PaseError if the file cannot
    be read, and Infeasible if a row of a program cannot be met.
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
        "the file is neither an IOPDDL instance (an object with 'problem') nor an index (an object with a 'nodes' "
        "list, with an .npz next to the file)",
        where=str(path),
        fix="name files in other formats .wcsp, .uai or .mps",
    )


def write_solution(path: Path, choice: np.ndarray) -> None:
    """Writes a choice in the contest's format: a JSON list with one config index per node."""
    write_atomically(path, json.dumps([int(k) for k in choice]) + "\n")


def _text(path: Path) -> str:
    """The text of a file."""
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as err:
        raise PaseError(f"the file is not UTF-8 text (byte {err.start})", where=str(path)) from None


def _read_bytes(path: Path) -> bytes:
    """The file's bytes, unpacked if it is gzip-compressed."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        most = min(MAX_BYTES, max(_UNPACKED_BYTES, _RATIO * path.stat().st_size)) if packed else MAX_BYTES
        with gzip.open(path, "rb") if packed else open(path, "rb") as f:
            data = f.read(most + 1)
    except FileNotFoundError:
        raise PaseError("no such file", where=str(path)) from None
    except IsADirectoryError:
        raise PaseError("this is a folder", where=str(path), fix="give an instance file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as err:
        raise PaseError(
            f"the gzip data is damaged ({err})", where=str(path), fix="fetch the file again"
        ) from None
    except OSError as err:
        raise PaseError(f"cannot be read ({err.strerror or err})", where=str(path)) from None
    if len(data) > most:
        hint = "unpack it first if you trust it" if packed else ""
        raise PaseError(f"the file has more than {most >> 20} MiB when unpacked", where=str(path), fix=hint)
    return data


def _list(path: Path, holder: Any, key: str, where: str) -> list[Any]:
    """The list under a key of an object. where: the path of the object in the file."""
    got = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(got, list):
        raise PaseError(f"{where}.{key} must be a list, but is {_kind(got)}", where=str(path))
    return got


def _kind(x: object) -> str:
    """A short description of a JSON value for messages."""
    return "nothing" if x is None else f"{type(x).__name__} {str(x)[:40]!r}"


def _numbers(path: Path, values: object, where: str) -> np.ndarray:
    """A float64 vector. Numbers of 1e18 and above become inf. NaN, text and negative infinity raise PaseError."""
    if not isinstance(values, list):
        raise PaseError(f"{where} must be a list of numbers, but is {_kind(values)}", where=str(path))
    if not all(type(x) in (int, float) for x in values):
        bad = next(x for x in values if type(x) not in (int, float))
        raise PaseError(f"{where} contains {_kind(bad)}, which is not a number", where=str(path))
    try:
        a = np.array(values, dtype=np.float64)
    except OverflowError:
        raise PaseError(f"{where} contains a number beyond the range of float64", where=str(path)) from None
    return _usable(path, a, where)


def _usable(path: Path, a: np.ndarray, where: str) -> np.ndarray:
    """Check a vector or matrix of costs; costs of 1e18 and above become inf."""
    if np.isnan(a).any():
        raise PaseError(f"{where} contains NaN", where=str(path), fix="use 1e18 or more to forbid a choice")
    if np.isneginf(a).any():
        raise PaseError(f"{where} contains -infinity, which is not a valid cost", where=str(path))
    return np.where(a >= FORBIDDEN, np.inf, a)


def _iopddl(path: Path, problem: JsonObject) -> tuple[CostTables, MemoryProfile]:
    """Read an instance in the IOPDDL format."""
    nodes = problem.get("nodes")
    costs = _list(path, nodes, "costs", "problem.nodes")
    usages = _list(path, nodes, "usages", "problem.nodes")
    intervals = _list(path, nodes, "intervals", "problem.nodes")
    n = len(costs)
    if n > MAX_NODES:
        raise PaseError(f"the instance has {n} nodes; at most {MAX_NODES} can be read", where=str(path))
    if len(usages) != n or len(intervals) != n:
        raise PaseError(
            f"problem.nodes has {n} costs, {len(usages)} usages and {len(intervals)} intervals, but each node needs "
            "one of each",
            where=str(path),
        )
    both = [_iopddl_node(path, v, costs[v], usages[v]) for v in range(n)]
    node_costs, held = [c for c, _ in both], [u for _, u in both]
    span = np.array([_iopddl_interval(path, v, pair) for v, pair in enumerate(intervals)], np.int64)
    limit = problem.get("usage_limit")
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not float(limit) >= 0:
        raise PaseError(
            f"problem.usage_limit must be a number of bytes, but is {_kind(limit)}", where=str(path)
        )
    edges = _iopddl_edges(path, problem.get("edges"), node_costs)
    start, stop = _dense_points(span.reshape(n, 2))
    profile = MemoryProfile(bytes=tuple(held), start=start, stop=stop, limit_bytes=float(limit))
    return CostTables(node_costs=tuple(node_costs), edges=edges), profile


def _iopddl_node(path: Path, v: int, costs: Any, usages: Any) -> tuple[np.ndarray, np.ndarray]:
    """The costs and the bytes of a node's strategies."""
    c = _numbers(path, costs, f"problem.nodes.costs[{v}]")
    u = _numbers(path, usages, f"problem.nodes.usages[{v}]")
    if not c.size:
        raise PaseError(
            f"problem.nodes.costs[{v}] is empty, but a node needs at least one strategy", where=str(path)
        )
    if c.size != u.size:
        raise PaseError(f"node {v} has {c.size} costs, but {u.size} usages", where=str(path))
    if (u < 0).any():
        raise PaseError(f"problem.nodes.usages[{v}] contains a negative number of bytes", where=str(path))
    return c, u


def _iopddl_interval(path: Path, v: int, pair: Any) -> list[int]:
    """Check the interval of a node."""
    if not (isinstance(pair, list) and len(pair) == 2 and all(type(t) is int for t in pair)):
        raise PaseError(
            f"problem.nodes.intervals[{v}] must be [start, stop], but is {_kind(pair)}", where=str(path)
        )
    if not 0 <= pair[0] <= 1 << 40 or not 0 <= pair[1] <= 1 << 40:
        raise PaseError(
            f"problem.nodes.intervals[{v}] = {pair} is out of range 0 … {1 << 40}", where=str(path)
        )
    return pair


def _iopddl_edges(path: Path, edges: Any, node_costs: list[np.ndarray]) -> tuple[EdgeTable, ...]:
    """The edges between different nodes. The cost of an edge from a node to itself is added to the node's costs."""
    pairs = _list(path, edges, "nodes", "problem.edges")
    matrices = _list(path, edges, "costs", "problem.edges")
    if len(pairs) != len(matrices):
        raise PaseError(
            f"problem.edges has {len(pairs)} pairs of nodes, but {len(matrices)} matrices", where=str(path)
        )
    n, entries = len(node_costs), 0
    iota: dict[int, np.ndarray] = {}
    tables = []
    for i, (pair, flat) in enumerate(zip(pairs, matrices, strict=True)):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(v) is int for v in pair)):
            raise PaseError(
                f"problem.edges.nodes[{i}] must be a pair of nodes, but is {_kind(pair)}", where=str(path)
            )
        a, b = pair
        if not (0 <= a < n and 0 <= b < n):
            raise PaseError(
                f"problem.edges.nodes[{i}] = [{a}, {b}] contains a node outside 0 … {n - 1}", where=str(path)
            )
        m = _numbers(path, flat, f"problem.edges.costs[{i}]")
        ka, kb = node_costs[a].size, node_costs[b].size
        if m.size != ka * kb:
            raise PaseError(
                f"problem.edges.costs[{i}] has {m.size} numbers, but needs {ka} × {kb}", where=str(path)
            )
        entries += m.size
        if entries > MAX_ENTRIES:
            raise PaseError(
                f"there are more than {MAX_ENTRIES} edge costs, the most that can be read", where=str(path)
            )
        if a == b:  # both ends have the same config, so only the diagonal counts, as a node cost
            node_costs[a] = node_costs[a] + m.reshape(ka, ka).diagonal()
            continue
        for k in (ka, kb):
            if k not in iota:
                iota[k] = np.arange(k, dtype=np.int32)
        tables.append(EdgeTable(src=a, dst=b, cost=m.reshape(ka, kb), src_class=iota[ka], dst_class=iota[kb]))
    return tuple(tables)


def _dense_points(span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The intervals in terms of the points at which some interval starts, renumbered 0, 1, ….

    Usage rises only where an interval starts, so these points imply all others.
    """
    live = span[:, 1] > span[:, 0]
    points = np.unique(span[live, 0])
    start = np.searchsorted(points, span[:, 0])
    stop = np.searchsorted(points, span[:, 1])
    start[~live] = stop[~live] = 0
    return start, stop


def _indexed(path: Path, doc: JsonObject) -> CostTables:
    """Read an index and the arrays in its .npz."""
    arrays_path = path.with_suffix(".npz")
    nodes, edges = _list(path, doc, "nodes", "index"), _list(path, doc, "edges", "index")
    wanted: dict[str, int] = {}  # array name -> number of dimensions
    for where, rows, ndim in (("nodes", nodes, 1), ("edges", edges, 2)):
        for i, row in enumerate(rows):
            key = row.get("costs") if isinstance(row, dict) else None
            if not isinstance(key, str):
                raise PaseError(
                    f"{where}[{i}].costs must be the name of an array, but is {_kind(key)}", where=str(path)
                )
            if wanted.setdefault(key, ndim) != ndim:
                raise PaseError(f"array '{key}' is used both as a vector and as a matrix", where=str(path))
    arrays = _read_npz(arrays_path, wanted)
    node_costs = tuple(arrays[row["costs"]] for row in nodes)
    iota = {c.size: np.arange(c.size, dtype=np.int32) for c in node_costs}
    tables = []
    for i, row in enumerate(edges):
        a, b = row.get("src"), row.get("dst")
        if type(a) is not int or type(b) is not int or not (0 <= a < len(nodes) and 0 <= b < len(nodes)):
            raise PaseError(
                f"edges[{i}] joins {a!r} and {b!r}, but there are {len(nodes)} nodes", where=str(path)
            )
        if a == b:
            raise PaseError(
                f"edges[{i}] joins node {a} to itself", where=str(path), fix="add its cost to the node"
            )
        cost, shape = arrays[row["costs"]], (node_costs[a].size, node_costs[b].size)
        if cost.shape != shape:
            raise PaseError(
                f"edges[{i}] has the shape {cost.shape} in {arrays_path.name}, but needs {shape}",
                where=str(path),
            )
        tables.append(EdgeTable(src=a, dst=b, cost=cost, src_class=iota[shape[0]], dst_class=iota[shape[1]]))
    names = tuple(str(row.get("name", v)) for v, row in enumerate(nodes))
    return CostTables(node_costs=node_costs, edges=tuple(tables), names=names)


def _read_npz(path: Path, wanted: dict[str, int]) -> dict[str, np.ndarray]:
    """The named arrays as float64. Equal names give the same object."""
    out: dict[str, np.ndarray] = {}
    entries = 0
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            for key, ndim in wanted.items():
                member = key + ".npy"
                if member not in sizes:
                    raise PaseError(f"array '{key}', which the index refers to, is missing", where=str(path))
                with archive.open(member) as f:
                    version = np.lib.format.read_magic(f)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(f)
                if len(shape) != ndim or dtype.kind not in "iuf":
                    raise PaseError(
                        f"array '{key}' is {dtype} {shape}, but must be {ndim}-dimensional numbers",
                        where=str(path),
                    )
                count = math.prod(shape)
                entries += count
                if entries > MAX_ENTRIES or count * dtype.itemsize > sizes[member]:
                    raise PaseError(
                        f"array '{key}' claims to have {count} numbers, more than it contains or can be read",
                        where=str(path),
                    )
                if not count:
                    raise PaseError(
                        f"array '{key}' is empty, but a node needs at least one config", where=str(path)
                    )
                with archive.open(member) as f:
                    a = np.lib.format.read_array(f, allow_pickle=False)
                out[key] = _usable(path, np.ascontiguousarray(a, dtype=np.float64), f"array '{key}'")
    except FileNotFoundError:
        raise PaseError("no such file", where=str(path), fix="put the index's .npz next to it") from None
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as err:
        raise PaseError(
            f"the archive is damaged or encrypted ({err})", where=str(path), fix="fetch the file again"
        ) from None
    except OSError as err:
        raise PaseError(f"cannot be read ({err.strerror or err})", where=str(path)) from None
    except PaseError:
        raise
    except (ValueError, SyntaxError) as err:  # numpy raises these for a malformed header
        raise PaseError(f"an array is damaged ({err})", where=str(path), fix="fetch the file again") from None
    return out
