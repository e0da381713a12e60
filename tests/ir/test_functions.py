"""The table of functions: what it says about derivatives, against numpy and difference quotients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pase.ir.functions import BY_KIND, FUNCTIONS

X, Y = np.random.default_rng(0).uniform(0.2, 1.5, (2, 7))
STEP = 1e-6

LINEAR: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "real": np.real,
    "conj": np.conj,
    "reduce_sum": np.sum,
    "cumsum": np.cumsum,
    "fft": np.fft.fft,
}
OF_THE_RESULT: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "exp": (np.exp, lambda r: r),
    "exp2": (np.exp2, lambda r: r * np.log(2)),
    "expm1": (np.expm1, lambda r: r + 1),
    "tanh": (np.tanh, lambda r: 1 - r * r),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda r: r * (1 - r)),
    "sqrt": (np.sqrt, lambda r: 0.5 / r),
    "rsqrt": (lambda x: x**-0.5, lambda r: -0.5 * r**3),
    "cbrt": (np.cbrt, lambda r: 1 / (3 * r * r)),
    "reciprocal": (lambda x: 1 / x, lambda r: -r * r),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_linear(name: str) -> None:
    assert FUNCTIONS[name].linear
    f, n = LINEAR[name], 2 if name in ("add", "sub") else 1
    a, b = (X, Y)[:n], (Y, X)[:n]
    both = f(*(2 * x + 3 * y for x, y in zip(a, b, strict=True)))
    np.testing.assert_allclose(both, 2 * f(*a) + 3 * f(*b), rtol=1e-12)


@pytest.mark.parametrize("name", OF_THE_RESULT)
def test_the_result_alone_gives_the_derivative(name: str) -> None:
    f, derivative = OF_THE_RESULT[name]
    assert FUNCTIONS[name].needs == "result"
    slope = (f(X + STEP) - f(X - STEP)) / (2 * STEP)
    np.testing.assert_allclose(derivative(f(X)), slope, rtol=1e-6)


def test_no_gradient_passes_what_is_true_or_false() -> None:
    assert not [f.name for f in FUNCTIONS.values() if f.boolean and f.differentiable]


def test_expensive_functions_are_divisions_roots_and_the_transcendental() -> None:
    assert {"div", "sqrt", "exp", "tanh"} <= {n for n, f in FUNCTIONS.items() if f.expensive}
    assert not {"add", "mul", "integer_pow", "cast"} & {n for n, f in FUNCTIONS.items() if f.expensive}


def test_every_kind_has_a_function_of_the_table() -> None:
    assert all(FUNCTIONS[f.name] is f for f in BY_KIND.values())
