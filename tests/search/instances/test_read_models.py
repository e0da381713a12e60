"""Instances of other solvers: a choice costs what the file states, and the best choice is that of brute force."""

from __future__ import annotations

import gzip
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pase.errors import Infeasible, PaseError
from pase.search import solve, verify
from pase.search.instances.readers import read_instance


def random_scopes(rng: np.random.Generator) -> tuple[list[int], list[tuple[int, ...]]]:
    """Sizes of up to six variables, and scopes of up to four of them."""
    sizes = [int(k) for k in rng.integers(1, 4, int(rng.integers(1, 7)))]
    scopes = []
    for _ in range(int(rng.integers(0, 8))):
        arity = int(rng.integers(0, min(4, len(sizes)) + 1))
        scopes.append(tuple(int(v) for v in rng.permutation(len(sizes))[:arity]))
    return sizes, scopes


def cheapest(
    sizes: list[int], functions: list[tuple[tuple[int, ...], dict[tuple[int, ...], float]]]
) -> float:
    """The least cost, by evaluating every function for every assignment."""
    return min(
        sum(cost[tuple(x[v] for v in scope)] for scope, cost in functions)
        for x in product(*(range(k) for k in sizes))
    )


def compare(path: Path, want: float, exact: bool = True) -> None:
    tables, memory = read_instance(path)
    if not np.isfinite(want):
        with pytest.raises(Infeasible):
            solve(tables, memory)
        return
    found = solve(tables, memory)
    cost = verify(tables, found, memory)
    assert found.optimal and (cost == want if exact else cost == pytest.approx(want, rel=1e-12, abs=1e-12))


def test_weighted_csps_are_brute_force(tmp_path: Path) -> None:
    """Tuples and defaults, forbidden costs, functions of zero to four variables, with and without gzip."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        sizes, scopes = random_scopes(rng)
        top = 40
        functions, lines = (
            [],
            [f"random {len(sizes)} {max(sizes)} {len(scopes)} {top}", " ".join(map(str, sizes))],
        )
        for scope in scopes:
            default = int(rng.choice([0, 3, top]))
            every = list(product(*(range(sizes[v]) for v in scope)))
            stated = {
                t: int(rng.choice([0, 1, 7, 25, top, top + 5])) for t in every if scope and rng.random() < 0.6
            }
            lines.append(" ".join(map(str, [len(scope), *scope, default, len(stated)])))
            lines += [" ".join(map(str, [*t, cost])) for t, cost in stated.items()]
            cost = {t: float(stated.get(t, default)) for t in every}
            functions.append((scope, {t: np.inf if c >= top else c for t, c in cost.items()}))
        path = tmp_path / ("x.wcsp.gz" if seed % 2 else "x.wcsp")
        data = ("\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if seed % 2 else data)
        compare(path, cheapest(sizes, functions))


def test_graphical_models_are_brute_force(tmp_path: Path) -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        sizes, scopes = random_scopes(rng)
        lines = ["MARKOV", str(len(sizes)), " ".join(map(str, sizes)), str(len(scopes))]
        lines += [" ".join(map(str, [len(scope), *scope])) for scope in scopes]
        functions = []
        for scope in scopes:
            every = list(product(*(range(sizes[v]) for v in scope)))
            weight = {t: float(rng.choice([0.0, 0.125, 0.3, 1.0, 4.0])) for t in every}
            lines += [str(len(every)), " ".join(repr(weight[t]) for t in every)]
            functions.append((scope, {t: -np.log(w) if w else np.inf for t, w in weight.items()}))
        path = tmp_path / "x.uai"
        path.write_text("\n".join(lines))
        compare(path, cheapest(sizes, functions), exact=False)


def random_program(rng: np.random.Generator) -> tuple[str, float]:
    """A 0/1 program in MPS format, and its optimum by brute force (inf if there is none)."""
    n = int(rng.integers(2, 10))
    names = [f"x{i}" for i in range(n)]
    objective = rng.integers(-9, 10, n).astype(float)
    constant, maximise = int(rng.integers(-5, 6)), bool(rng.random() < 0.3)
    rows = []  # (sense, coefficients, side, range)
    at = 0
    while at < n and rng.random() < 0.7:  # "exactly one" and "at most one"
        size = int(rng.integers(1, 4))
        a = np.zeros(n)
        a[at : at + size] = 1
        rows.append((str(rng.choice(["E", "L"])), a, 1, None))
        at += size
    for _ in range(int(rng.integers(0, 5))):
        a = rng.integers(-4, 6, n) * (rng.random(n) < rng.choice([0.4, 1.0]))
        width = None if rng.random() < 0.7 else int(rng.integers(-3, 4))
        rows.append(
            (str(rng.choice(["L", "G", "E"], p=[0.5, 0.3, 0.2])), a, int(rng.integers(-4, 12)), width)
        )
    fixed = {int(i): int(rng.integers(0, 2)) for i in np.flatnonzero(rng.random(n) < 0.1)}
    text = ["NAME random", *(["OBJSENSE", "    MAX"] if maximise else []), "ROWS", " N cost"]
    text += [f" {sense} r{i}" for i, (sense, *_) in enumerate(rows)]
    text += ["COLUMNS", " M1 'MARKER' 'INTORG'"]
    for j, name in enumerate(names):
        text.append(f" {name} cost {objective[j]}")
        text += [f" {name} r{i} {a[j]}" for i, (_, a, _, _) in enumerate(rows) if a[j]]
    text += [" M2 'MARKER' 'INTEND'", "RHS", f" RHS cost {-constant}"]
    text += [f" RHS r{i} {side}" for i, (_, _, side, _) in enumerate(rows)]
    text += ["RANGES", *(f" RNG r{i} {w}" for i, (*_, w) in enumerate(rows) if w is not None), "BOUNDS"]
    text += [f" FX BND {names[j]} {fixed[j]}" if j in fixed else f" UP BND {names[j]} 1" for j in range(n)]
    best = np.inf
    for bits in product((0, 1), repeat=n):
        x = np.array(bits)
        if any(x[j] != value for j, value in fixed.items()):
            continue
        if all(_meets(sense, float(a @ x), side, width) for sense, a, side, width in rows):
            value = float(objective @ x) + constant
            best = min(best, -value if maximise else value)
    return "\n".join([*text, "ENDATA"]), best


def _meets(sense: str, value: float, side: int, width: int | None) -> bool:
    """The table of ranges in the MPS format's definition."""
    if width is None:
        return {"L": value <= side, "G": value >= side, "E": value == side}[sense]
    if sense == "E":
        return side <= value <= side + width if width >= 0 else side + width <= value <= side
    return side - abs(width) <= value <= side if sense == "L" else side <= value <= side + abs(width)


@pytest.mark.parametrize("block", range(2))
def test_programs_are_brute_force(tmp_path: Path, block: int) -> None:
    """Groups, pairs, limits over several rows, ranges, fixed variables, constants, and both directions."""
    wide = 0
    for seed in range(100 * block, 100 * block + 100):
        text, want = random_program(np.random.default_rng(seed))
        path = tmp_path / "x.mps"
        path.write_text(text)
        if np.isfinite(want):
            wide += read_instance(path)[1] is not None
            compare(path, want)
        else:
            with pytest.raises(Infeasible):
                solve(*read_instance(path))
    assert wide > 10


@pytest.mark.parametrize(
    ("name", "text", "place", "word"),
    [
        ("a.wcsp", "x 1 2 1 9\n2\n1 0 0", "", "tuples of cost function 0"),
        ("b.wcsp", "x 1 2 1 9\n2\n-1 0 0 0", "", "shared functions"),
        ("c.wcsp", "x 2 2 1 9\n2 2\n2 0 1 -1 salldiff", "", "global cost functions"),
        ("d.wcsp", "x 1 2 1 9\n2\n1 0 0 1\n2 5", "", "domains"),
        ("e.wcsp", "x 2 2 1 9\n2 2\n2 1 1 0 0", "", "twice"),
        ("f.wcsp", "x 1 2 0 9\n2\n7", "", "'7'"),
        ("g.wcsp", f"x 9 99 1 9\n{'99 ' * 9}\n9 {' '.join('012345678')} 0 0", "", "200,000,000"),
        ("a.uai", "FOO 1", "", "MARKOV or BAYES"),
        ("b.uai", "MARKOV 1 2 1 1 0 3 1 1 1", "", "entries of function 0"),
        ("c.uai", "MARKOV 1 2 1 1 0 2 1 -1", "", "negative"),
        ("d.uai", "MARKOV 1 2 1 1 0 2 1 x", "", "not a number"),
        ("a.mps", "ROWS\n N c\nCOLUMNS\n x c 1\nENDATA", "", "'x'"),
        ("b.mps", "ROWS\n N c\nCOLUMNS\n x d 1\nENDATA", ": line 4", "'d'"),
        ("c.mps", "ROWS\n N c\nSOS\n", ": line 3", "'SOS'"),
        ("d.mps", "ROWS\n L c\n", "", "objective"),
        ("e.mps", "ROWS\n N c\nCOLUMNS\n x c 1\nBOUNDS\n UP B x 3\n", "", "'x'"),
        ("f.mps", "ROWS\n N c\nCOLUMNS\n x c 1\nBOUNDS\n FR B x\n", ": line 6", "'FR'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, place: str, word: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PaseError) as e:
        read_instance(path)
    assert e.value.where == f"{path}{place}" and word in e.value.what


def test_a_row_that_cannot_be_met_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "x.mps"
    path.write_text(
        "ROWS\n N c\n G r\nCOLUMNS\n x c 1 r 1\n y c 1 r 1\n z r 1\nRHS\n R r 4\n"
        "BOUNDS\n BV B x\n BV B y\n BV B z\nENDATA\n"
    )
    with pytest.raises(Infeasible) as e:
        read_instance(path)
    assert e.value.where == f"{path}: row r"
