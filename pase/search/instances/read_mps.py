"""Reads programs in 0/1 variables (.mps) as nodes, edges and one limit.

A row of the form "exactly one of these" or "at most one of these" becomes a node; its config is the variable that is 1.
Every other variable becomes a node with two configs. A row over one or two nodes forbids configs or pairs. A row over
more nodes becomes a point of a memory profile, where each node holds what its config adds to the row, above the
minimum that the node can add.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.search.instances.functions import CostFunction, tables_of
from pase.search.types import MemoryProfile
from pase.tables.types import CostTables

__all__ = ["read_mps"]

_SECTIONS = {"NAME", "OBJSENSE", "ROWS", "COLUMNS", "RHS", "RANGES", "BOUNDS", "ENDATA"}
_SLACK = 1e-9  # relative to a row's size: the rounding error allowed in its sum


@dataclass(eq=False)
class _MpsProgram:
    """A parsed file.

    rows: name -> sense (N, L, G or E), in the file's order. columns: variable -> row -> coefficient. sides, ranges:
    right-hand sides and ranges by row. whole: integer variables. fixed, most: fixed values and upper bounds by
    variable. sign: -1 to maximise.
    """

    rows: dict[str, str] = field(default_factory=dict)
    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    sides: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    fixed: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    sign: float = 1.0


def read_mps(path: Path, text: str) -> tuple[CostTables, MemoryProfile | None]:
    """Reads a program: its tables, and its limit if a row needs one.

    Each node's name lists its variables in the order of its configs; "none" is the config in which all are 0.
    Raises PaseError if the file is not a 0/1 program in free MPS format, and Infeasible if a single row cannot be met.
    """
    program = _parsed(path, text)
    names = list(program.columns)
    if not names:
        raise PaseError("the program has no variables", where=str(path))
    for name in names:
        if name not in program.whole or program.most.get(name) != 1.0:
            raise PaseError(
                f"variable {name[:40]!r} is not 0 or 1",
                where=str(path),
                fix="restrict every variable to 0 or 1",
            )
    index = {name: i for i, name in enumerate(names)}
    by_row: dict[str, list[tuple[int, float]]] = {row: [] for row in program.rows}
    for name, terms in program.columns.items():
        for row, value in terms.items():
            if value:
                by_row[row].append((index[name], value))
    groups, used = _groups(program, by_row, len(names))
    return _stated(path, program, names, by_row, groups, used)


def _parsed(path: Path, text: str) -> _MpsProgram:
    """Parse the sections of a file."""
    out, section, integral = _MpsProgram(), "", False
    for i, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("*"):
            continue
        words = line.split()
        where = f"{path}: line {i}"
        if not line[0].isspace():
            section = words[0].upper()
            if section not in _SECTIONS:
                raise PaseError(
                    f"section {section[:40]!r} is not supported",
                    where=where,
                    fix=f"use only the sections {', '.join(sorted(_SECTIONS))}",
                )
            if section == "ENDATA":
                break
            if section == "OBJSENSE" and len(words) > 1:
                out.sign = -1.0 if words[1].upper().startswith("MAX") else 1.0
        elif section == "OBJSENSE":
            out.sign = -1.0 if words[0].upper().startswith("MAX") else 1.0
        elif section == "ROWS":
            if len(words) != 2 or words[0].upper() not in "NLGE" or words[1] in out.rows:
                raise PaseError("a row must have a sense (N, L, G or E) and a new name", where=where)
            out.rows[words[1]] = words[0].upper()
        elif section == "COLUMNS" and "'MARKER'" in words:
            integral = "'INTORG'" in words
        elif section == "COLUMNS":
            terms = out.columns.setdefault(words[0], {})
            if integral:
                out.whole.add(words[0])
            for row, value in _pairs(out, where, words[1:]):
                terms[row] = terms.get(row, 0.0) + value
        elif section in ("RHS", "RANGES"):
            into = out.sides if section == "RHS" else out.ranges
            into.update(_pairs(out, where, words[len(words) % 2 :]))
        elif section == "BOUNDS":
            _bound(out, where, words)
        else:
            raise PaseError(
                "there is data before the first section", where=where, fix="put a section such as ROWS first"
            )
    if "N" not in out.rows.values():
        raise PaseError("there is no objective", where=str(path), fix="add a row of sense N")
    return out


def _pairs(program: _MpsProgram, where: str, words: list[str]) -> list[tuple[str, float]]:
    """The (row, number) pairs of a line."""
    if len(words) % 2 or not words:
        raise PaseError("rows and numbers must alternate", where=where, fix="use names without spaces")
    out = []
    for row, word in zip(words[::2], words[1::2], strict=True):
        if row not in program.rows:
            raise PaseError(
                f"there is no row {row[:40]!r}", where=where, fix="declare it in the section ROWS"
            )
        out.append((row, _number(where, word)))
    return out


def _number(where: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise PaseError(f"{word[:40]!r} is not a number", where=where) from None
    if not np.isfinite(value):
        raise PaseError(f"{word[:40]!r} is not finite", where=where)
    return value


def _bound(program: _MpsProgram, where: str, words: list[str]) -> None:
    """Apply a line of the section BOUNDS."""
    kind = words[0].upper()
    name = next((w for w in words[1:] if w in program.columns), None)
    if name is None:
        raise PaseError("the bound's variable does not occur in the columns", where=where)
    if kind == "BV":
        program.whole.add(name)
        program.most[name] = 1.0
    elif kind in ("UP", "UI", "FX", "LO", "LI"):
        value = _number(where, words[-1])
        if kind in ("UI", "LI"):
            program.whole.add(name)
        if kind in ("UP", "UI") and value:
            program.most[name] = value
        elif value or kind not in (
            "LO",
            "LI",
        ):  # an upper bound of 0 or a lower bound of 1 fixes the variable
            program.most[name], program.fixed[name] = 1.0, value
        if program.fixed.get(name, 0.0) not in (0.0, 1.0):
            raise PaseError(
                f"variable {name[:40]!r} is not 0 or 1", where=where, fix="restrict every variable to 0 or 1"
            )
    else:
        raise PaseError(
            f"bound {kind[:40]!r} of variable {name[:40]!r} is not supported",
            where=where,
            fix="restrict every variable to 0 or 1",
        )


def _groups(
    program: _MpsProgram, by_row: dict[str, list[tuple[int, float]]], n: int
) -> tuple[list[tuple[list[int], bool]], set[str]]:
    """(Variables of each node and whether all may be 0; the rows that these nodes express). Longest rows first."""
    ones = []
    for row, terms in by_row.items():
        side, sense = program.sides.get(row, 0.0), program.rows[row]
        alike = side > 0 and row not in program.ranges and all(value == side for _, value in terms)
        if alike and sense in "EL" and len(terms) > 1:
            ones.append((len(terms), sense == "E", row))
    taken, groups, used = np.zeros(n, bool), list[tuple[list[int], bool]](), set[str]()
    for _, exactly, row in sorted(ones, key=lambda r: (-r[0], not r[1])):
        members = [i for i, _ in by_row[row]]
        if not taken[members].any():
            taken[members] = True
            groups.append((members, not exactly))
            used.add(row)
    return groups + [([int(i)], True) for i in np.flatnonzero(~taken)], used


def _stated(
    path: Path,
    program: _MpsProgram,
    names: list[str],
    by_row: dict[str, list[tuple[int, float]]],
    groups: list[tuple[list[int], bool]],
    used: set[str],
) -> tuple[CostTables, MemoryProfile | None]:
    """Build the tables and the limit from the groups and the remaining rows."""
    node, config = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    sizes, labels = [], []
    for v, (members, free) in enumerate(groups):
        node[members], config[members] = v, np.arange(len(members)) + free
        sizes.append(len(members) + free)
        labels.append(" ".join([*(["none"] if free else []), *(names[i] for i in members)]))
    functions, wide = list[CostFunction](), list[tuple[dict[int, np.ndarray], float]]()

    def parts(terms: list[tuple[int, float]]) -> dict[int, np.ndarray]:
        """Node -> what each of its configs adds to the row."""
        out: dict[int, np.ndarray] = {}
        for v, some in groupby(sorted(terms, key=lambda t: int(node[t[0]])), key=lambda t: int(node[t[0]])):
            out[v] = np.zeros(sizes[v])
            for i, value in some:
                out[v][config[i]] += value
        return out

    for name, value in program.fixed.items():
        i = names.index(name)
        is_one = np.arange(sizes[node[i]]) == config[i]
        functions.append(
            CostFunction(scope=(int(node[i]),), cost=np.where(is_one == bool(value), 0.0, np.inf))
        )
    objective = next(row for row, sense in program.rows.items() if sense == "N")
    for v, cost in parts(by_row[objective]).items():
        functions.append(CostFunction(scope=(v,), cost=program.sign * cost))
    functions.append(CostFunction(scope=(), cost=np.array(-program.sign * program.sides.get(objective, 0.0))))
    for row, sense in program.rows.items():
        if sense == "N" or row in used:
            continue
        adds = parts(by_row[row])
        for sign, side in _sides(sense, program.sides.get(row, 0.0), program.ranges.get(row)):
            _state_row(
                f"{path}: row {row[:40]}",
                {v: sign * a for v, a in adds.items()},
                sign * side,
                functions,
                wide,
            )
    return tables_of(sizes, functions, labels), _profile(wide, sizes)


def _sides(sense: str, side: float, width: float | None) -> list[tuple[float, float]]:
    """The bounds of a row's sum: (1, upper bound) and (-1, lower bound), if it has them."""
    if width is None:
        least, most = (side if sense != "L" else None), (side if sense != "G" else None)
    elif sense == "E":
        least, most = min(side, side + width), max(side, side + width)
    else:
        least, most = (side - abs(width), side) if sense == "L" else (side, side + abs(width))
    return [(s, x) for s, x in ((1.0, most), (-1.0, least)) if x is not None]


def _state_row(
    where: str,
    adds: dict[int, np.ndarray],
    most: float,
    functions: list[CostFunction],
    wide: list[tuple[dict[int, np.ndarray], float]],
) -> None:
    """State that the sum of what the nodes add is at most ``most``: by forbidden configs or pairs, or by a point of the
    limit."""
    size = max([abs(most), *(float(np.abs(a).max()) for a in adds.values()), 1.0])
    room = most + _SLACK * size - sum(float(a.min()) for a in adds.values())
    if room < 0:
        raise Infeasible("no values of the variables satisfy this row", where=where)
    spare = {v: a - a.min() for v, a in adds.items() if a.max() > a.min()}
    if sum(float(a.max()) for a in spare.values()) <= room:
        return  # the row always holds
    if len(spare) > 2:
        wide.append((spare, room))
        return
    total = np.zeros(())
    for a in spare.values():
        total = np.add.outer(total, a)
    functions.append(CostFunction(scope=tuple(spare), cost=np.where(total <= room, 0.0, np.inf)))


def _profile(wide: list[tuple[dict[int, np.ndarray], float]], sizes: list[int]) -> MemoryProfile | None:
    """The memory profile with a point for each row. The first node holds extra bytes, so that all rows have the largest
    limit."""
    if not wide:
        return None
    limit = max(room for _, room in wide)
    held, node, start = list[np.ndarray](), list[int](), list[int]()
    for t, (adds, room) in enumerate(wide):
        for v, a in adds.items():
            held.append(a)
            node.append(v)
            start.append(t)
        held.append(np.full(sizes[0], limit - room))
        node.append(0)
        start.append(t)
    # Each node must have an interval, so nodes without a limit get an empty one.
    unlimited = sorted(set(range(len(sizes))) - set(node))
    at = np.array(start + [0] * len(unlimited), np.int64)
    stop = np.concatenate([np.array(start, np.int64) + 1, np.zeros(len(unlimited), np.int64)])
    return MemoryProfile(
        bytes=(*held, *(np.zeros(sizes[v]) for v in unlimited)),
        start=at,
        stop=stop,
        limit_bytes=limit,
        node=np.array(node + unlimited, np.int64),
    )
