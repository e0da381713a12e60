"""PaSE's own model: FLOPs, and words times a ratio."""

import pytest

from pase.costmodels import get
from pase.machine import load, mesh_from


def test_paper_model_prices_the_prototypes_gemm():
    """B'(3m'n'k' + AR(m'n',P_k) + AR(m'k',P_n) + AR(n'k',P_m)), AR(w,P) = r 2(P-1)/P w, r = 5000."""
    model = get("paper", load("1080tix8"))
    mesh = mesh_from("m=4,n=2,k=4", 32)
    m, n, k = 64, 32, 128
    lm, ln, lk = m / 4, n / 2, k / 4

    def reduce(words, axis_set):
        return float(model.collective("all_reduce", mesh, axis_set, 8 * words))

    forward = float(model.compute("matmul", "float32", 2 * lm * ln * lk, 1e9))
    got = 3 * forward + reduce(lm * ln, 4) + reduce(lm * lk, 2) + reduce(ln * lk, 1)

    def ar(words, p):
        return 5000 * 2 * (p - 1) / p * words

    assert got == pytest.approx(3 * lm * ln * lk + ar(lm * ln, 4) + ar(lm * lk, 2) + ar(ln * lk, 4))


def test_paper_model_counts_a_multiply_add_once():
    model = get("paper", load("1080tix8"))
    assert [float(model.compute(kind, "float32", 100.0, 1e9)) for kind in ("matmul", "conv", "memory")] == [
        50.0,
        50.0,
        100.0,
    ]


def test_paper_model_knows_no_hierarchy_and_halves_the_all_reduce():
    model = get("paper", load("1080tix8"))
    inner, outer = (float(model.collective("all_reduce", mesh_from("8x8", 64), s, 1e6)) for s in (2, 1))
    assert inner == outer
    for kind in ("reduce_scatter", "all_gather"):
        assert 2 * float(model.collective(kind, mesh_from("8x8", 64), 1, 1e6)) == outer


def test_paper_model_takes_its_ratio_from_the_machine():
    def r(name):
        model = get("paper", load(name))
        return float(model.collective("permute", mesh_from("2", 2), 1, 8.0))

    assert r("1080tix8") == r("2080tix8") == 5000
    assert r("h100x8") == pytest.approx(8 * 494.7e12 / 50e9)
