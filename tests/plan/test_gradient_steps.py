"""How far parameters move along a line, by hand."""

from __future__ import annotations

import numpy as np

from pase.plan.gradient_steps import uphill_factors, zero_scales

PARTS = [np.array([3.0, 0.0, 4.0, 0.0]), np.zeros(9), np.array([-2.0])]
SQUARES = np.array([float((x**2).sum()) for x in PARTS])
ELEMENTS = np.array([x.size for x in PARTS])


def test_zeros_move_by_the_root_mean_square_of_their_parameter() -> None:
    assert zero_scales(SQUARES, ELEMENTS).tolist() == [2.5, 0.1, 2.0]
    assert zero_scales(np.zeros(1), np.zeros(1)).tolist() == [0.1]  # a parameter without elements


def test_a_step_uphill_has_the_norm_of_the_parameter() -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=x.size) for x in PARTS]
    norms = np.array([np.linalg.norm(g) for g in gradients])
    factors = uphill_factors(0.01, SQUARES, ELEMENTS, norms)
    moved = [np.linalg.norm(f * g) for f, g in zip(factors, gradients, strict=True)]
    # The parameter of zeros counts as one whose elements are all 0.1.
    np.testing.assert_allclose(moved, [0.01 * 5.0, 0.01 * 0.1 * 3.0, 0.01 * 2.0])


def test_without_a_gradient_nothing_moves() -> None:
    factors = uphill_factors(0.01, SQUARES, ELEMENTS, np.array([0.0, 1.0, 2.0]))
    assert factors[0] == 0.0 and (factors[1:] > 0).all()
