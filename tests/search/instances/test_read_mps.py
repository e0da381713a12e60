"""Programs in 0/1 variables: the best choice is that of brute force, and a row that cannot be met is proven."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import solve
from pase.search.instances.readers import read_instance
from tests.search.instances.compared import compare


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


def test_a_row_that_cannot_be_met_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "x.mps"
    path.write_text(
        "ROWS\n N c\n G r\nCOLUMNS\n x c 1 r 1\n y c 1 r 1\n z r 1\nRHS\n R r 4\n"
        "BOUNDS\n BV B x\n BV B y\n BV B z\nENDATA\n"
    )
    with pytest.raises(Infeasible) as e:
        read_instance(path)
    assert e.value.where == f"{path}: row r"
