"""Functions of Flax NNX modules as pure functions: what is trained, what is carried, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pase.errors import PaseError
from pase.frontends.jax.modules import ModuleFunction, has_modules, without_variables

X = jnp.ones((3, 2))


class Counting(nnx.Module):
    """A weight, and how often it was called."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.full((2,), 2.0))
        self.calls = nnx.Variable(jnp.int32(0))
        self.fixed = nnx.Variable(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return x * self.weight[...] + self.fixed[...]


def loss(model: Counting, x: Any) -> Any:
    return jnp.sum(model(x))


def pure(fn: Any = loss, mode: str = "train") -> ModuleFunction:
    return ModuleFunction.of(fn, mode, (Counting(), X))


def test_modules_are_found_inside_trees() -> None:
    assert has_modules({"a": [Counting()]}) and not has_modules({"a": [X]})


def test_parameters_are_trained_and_other_variables_are_the_state() -> None:
    opened = pure().open(Counting(), X)
    assert [x.shape for x in jax.tree.leaves(opened.params)] == [(2,)]
    assert sorted(x.shape for x in jax.tree.leaves(opened.state)) == [(), (2,)]
    assert opened.batch == (X,)


def test_only_what_is_written_has_a_next_value() -> None:
    fn = pure()
    opened = fn.open(Counting(), X)
    value, advanced = fn(*opened.arguments)
    assert float(value) == 3 * 2 * 3.0
    assert [int(x) for x in jax.tree.leaves(advanced.state)] == [1] and not jax.tree.leaves(advanced.params)
    assert int(opened.modules[0].calls[...]) == 0, "the user's module is not touched"  # type: ignore[attr-defined]


def test_gradients_are_those_of_nnx() -> None:
    fn = pure()
    opened = fn.open(Counting(), X)
    made = jax.grad(lambda p: fn(p, *opened.arguments[1:])[0])(opened.params)
    wanted = nnx.grad(loss)(Counting(), X)
    np.testing.assert_array_equal(*(jax.tree.leaves(without_variables(g))[0] for g in (made, wanted)))


def test_the_users_result_is_given_back() -> None:
    fn = pure(lambda model, x: (jnp.sum(model(x)), {"n": x.shape[0]}))
    value, aux, advanced = fn(*fn.open(Counting(), X).arguments)
    assert fn.returned((value, (aux, advanced)), True) == ((value, {"n": 3}), advanced)
    inference = pure(lambda model, x: model(x), "inference")
    out, advanced = inference.returned(inference(*inference.open(Counting(), X).arguments), False)
    assert out.shape == (3, 2) and advanced is not None


def test_variables_are_carried_beside_what_the_user_names() -> None:
    assert pure().carry({0: 1}) == {0: (1,), 1: (-1, 0), -1: (-1, 1)}
    assert pure(mode="inference").carry({0: 1})[0] == (0, 1)


def _other_dtype(model: Counting, x: Any) -> Any:
    model.calls = nnx.Variable(jnp.float32(0))
    return loss(model, x)


def _new_variable(model: Counting, x: Any) -> Any:
    model.seen = nnx.Variable(x)
    return loss(model, x)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (_other_dtype, r"calls.*from int32\[\] to float32\[\]"),
        (_new_variable, "seen"),
        (lambda model, x: (loss(model, x), model), "returns a Flax NNX module"),
    ],
)
def test_what_cannot_be_carried_is_refused(fn: Any, what: str) -> None:
    made = pure(fn)
    with pytest.raises(PaseError, match=what):
        made(*made.open(Counting(), X).arguments)


def test_other_arguments_than_those_compiled_for_are_refused() -> None:
    with pytest.raises(PaseError, match="its modules are in other places") as e:
        pure().open(X, X)
    assert e.value.where.startswith("argument 0")
