"""While loops and branches: the trip counts and probabilities that are priced, and the remarks about them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pase.errors import PaseError
from pase.frontends.jax.frontend import TracedJax, trace
from pase.ir import Op, simplify, verify
from pase.ops.branches import SELDOM
from tests.frontends.jax.cases import W, X

S = jax.ShapeDtypeStruct


def products(traced: TracedJax) -> list[Op]:
    graph = verify(simplify(verify(traced.graph)))
    return [op for n in graph.nodes for op in n.ops if op.kind == "matmul"]


def said(traced: TracedJax) -> str:
    return " ".join(map(str, traced.graph.remarks))


def turning(p: Any, x: Any, n: Any) -> Any:
    q = lax.stop_gradient(p)
    return jnp.sum(lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ q), x) @ p)


def test_a_loop_of_known_length_is_priced_so_often() -> None:
    def fn(p: Any, x: Any) -> Any:
        q = lax.stop_gradient(p)
        turned = lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, jnp.tanh(c[1] @ q)), (2, x))
        return jnp.sum(turned[1] @ p)

    traced = trace(fn, W, X)
    assert [op.times for op in products(traced)] == [5, 1]
    assert not traced.graph.remarks


def test_a_loop_of_unknown_length_asks_for_it() -> None:
    traced = trace(turning, W, X, S((), jnp.int32))
    assert [op.times for op in products(traced)] == [1, 1]
    assert "'while0'" in said(traced) and "(turning)" in said(traced)
    assert "--trips while0=N" in said(traced)
    given = trace(turning, W, X, S((), jnp.int32), dims={"while0": 1000})
    assert [op.times for op in products(given)] == [1000, 1] and not given.graph.remarks


def test_a_loop_that_is_not_there() -> None:
    with pytest.raises(PaseError, match="'while1'") as e:
        trace(turning, W, X, S((), jnp.int32), dims={"while1": 3})
    assert e.value.where == "model 'turning'" and e.value.fix.endswith(": while0")


def test_a_loss_behind_a_while_loop_has_no_gradient() -> None:
    def fn(p: Any, x: Any, n: Any) -> Any:
        return jnp.sum(lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ p), x))

    with pytest.raises(PaseError, match=r"while loop in reverse: use lax\.scan"):
        trace(fn, W, X, S((), jnp.int32))


def test_the_most_expensive_branch_is_priced_and_every_branch_may_be_split() -> None:
    def fn(p: Any, x: Any, which: Any) -> Any:
        return jnp.sum(lax.switch(which, [lambda a: a @ p, lambda a: a @ p @ p, jnp.sin], x))

    traced = trace(fn, W, X, S((), jnp.int32))
    assert [op.chance for op in products(traced)] == [SELDOM, 1.0, 1.0]
    graph = simplify(traced.graph)
    kinds = {d.kind for n in graph.nodes for op in n.ops if op.kind == "matmul" for d in n.space}
    assert kinds == {"parallel", "reduction"}
    assert "of the 3 branches" in said(traced)
    assert "number 1 (from 0)" in said(traced)


def test_branches_in_a_loop_turn_with_it() -> None:
    def fn(p: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return lax.cond(jnp.sum(h) > 0, lambda a: jnp.tanh(a @ w), lambda a: a, h), None

        return jnp.sum(lax.scan(body, x, p)[0])

    (op,) = products(trace(fn, S((6, 32, 32), jnp.float32), X))
    assert op.times == 6 and op.chance == 1.0


def choosing(p: Any, x: Any) -> Any:
    def one(h: Any) -> Any:
        return lax.cond(jnp.sum(h) > 0, lambda h: jnp.tanh(h @ p) @ p, lambda h: h @ p, h)

    return jnp.sum(one(one(x)))


def test_chances_of_branches_are_the_users() -> None:
    assert [op.chance for op in products(trace(choosing, W, X))] == [SELDOM, 1, 1] * 2
    assert "--chance cond1=P,P" in said(trace(choosing, W, X))
    told = trace(choosing, W, X, chances={"cond0": (0.75, 0.25), "cond1": (1, 0)})
    assert [op.chance for op in products(told)] == [0.75, 0.25, 0.25, 1, SELDOM, SELDOM]
    assert not told.graph.remarks and told.chances["cond0"] == (0.75, 0.25)


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.6), (1.5, -0.5)])
def test_chances_add_up_to_one(shares: tuple[float, ...]) -> None:
    with pytest.raises(PaseError) as e:
        trace(choosing, W, X, chances={"cond0": shares})
    assert "'cond0'" in e.value.where and "2 numbers" in e.value.fix


def test_a_conditional_that_is_not_there() -> None:
    with pytest.raises(PaseError, match="'cond2'") as e:
        trace(choosing, W, X, chances={"cond2": (1, 0)})
    assert e.value.fix.endswith(": cond0, cond1")


def test_a_gradient_of_branches_that_keep_other_values_is_read() -> None:
    """JAX fills what a branch does not keep for backward with an array of no contents."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p
            return jnp.sum(lax.cond(jnp.sum(x) > 0, lambda h: jnp.sin(h) * jnp.exp(h), lambda h: h**3, h))

        value, gradient = jax.value_and_grad(loss)(p)
        return p - gradient, value

    assert len(products(trace(step, W, X, mode="step"))) == 2


def test_only_what_a_parameter_reaches_in_a_loop_has_a_gradient() -> None:
    def fn(p: Any, x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            count, h, seen = carry
            return (count + 1.0, jnp.tanh(h @ p), seen + jnp.sum(x)), None

        (count, h, seen), _ = lax.scan(body, (0.0, x, 1.0), None, length=3)
        return jnp.sum(h) / count + seen

    graph = verify(simplify(verify(trace(fn, W, X).graph)))
    carried = [n.ops[0].writes[0].tensor for n in graph.nodes if n.ops[0].kind == "carry"]
    assert {graph.tensors[t].shape: graph.tensors[t].needs_grad for t in carried} == {
        (): False,
        X.shape: True,
    }


def test_a_loss_of_what_no_parameter_reaches_in_a_loop_has_no_gradient() -> None:
    def fn(p: Any, x: Any) -> Any:
        (h, count), _ = lax.scan(lambda c, _: ((c[0] @ p, c[1] + 1.0), None), (x, 0.0), None, length=3)
        return count + jnp.sum(lax.stop_gradient(h))

    with pytest.raises(PaseError) as e:
        trace(fn, W, X)
    assert "does not depend on any parameter" in e.value.what
