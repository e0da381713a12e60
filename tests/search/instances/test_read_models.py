"""Instances of other solvers: a choice costs what the file states, and the best choice is that of brute force."""

from __future__ import annotations

import gzip
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pase.errors import PaseError
from pase.search.instances.readers import read_instance
from tests.search.instances.compared import compare


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
