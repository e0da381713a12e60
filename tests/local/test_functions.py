"""How functions are computed: their derivatives are those of finite differences, and no function lacks one."""

import numpy as np
import pytest

from pase.ir.functions import FUNCTIONS
from pase.local.functions import COMPUTED, NUMPY, SLOPES

RNG = np.random.default_rng(0)
OPERANDS = {
    "integer_pow": lambda: [RNG.uniform(0.5, 2, 9), 3],
    "clamp": lambda: [-0.2, RNG.uniform(-1, 1, 9), 0.3],
    "where": lambda: [RNG.integers(0, 2, 9), *RNG.uniform(0.5, 2, (2, 9))],
    "select": lambda: [RNG.integers(0, 3, 9), *RNG.uniform(0.5, 2, (3, 9))],
    **dict.fromkeys(("add_scaled",), lambda: [*RNG.uniform(0.5, 2, (2, 9)), 1.5]),
    **dict.fromkeys(
        (
            *(
                "add",
                "sub",
                "mul",
                "div",
                "div_no_nan",
                "max",
                "min",
                "mod",
                "rem",
                "pow",
                "matmul",
                "conv",
                "gather",
                "lt",
                "passed",
            ),
            *("le", "gt", "ge", "eq", "ne", "floor_div", "all_of", "any_of"),
        ),
        lambda: list(RNG.uniform(0.5, 2, (2, 9))),
    ),
}
"""Function -> its operands; of all others, one operand."""


def test_each_function_is_known_and_has_a_derivative():
    assert set(COMPUTED) == set(SLOPES)
    assert set(COMPUTED) <= set(FUNCTIONS)


@pytest.mark.parametrize("name", sorted(set(COMPUTED) - {"stop_gradient", "passed"}))
def test_a_derivative_is_a_finite_difference(name):
    xs = OPERANDS.get(name, lambda: [RNG.uniform(0.5, 2, 9)])()
    made = COMPUTED[name](NUMPY, *xs)
    for i, x in enumerate(xs):
        if np.asarray(x).dtype != float or not np.ndim(x):
            continue
        low, high = (COMPUTED[name](NUMPY, *xs[:i], x + h, *xs[i + 1 :]) for h in (-1e-6, 1e-6))
        slope = SLOPES[name](i)(*xs, made)
        np.testing.assert_allclose(
            np.broadcast_to(slope, x.shape), (high * 1.0 - low * 1.0) / 2e-6, rtol=1e-5, atol=1e-7
        )
