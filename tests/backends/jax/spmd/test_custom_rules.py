"""Derivative rules that the user wrote (``jax.custom_vjp``): their FLOPs, their residuals and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import TOLERANCE, case_of
from bench.programs.child import flops
from pase.backends.audit.xla import sharded_step, unsharded_step
from pase.backends.jax.spmd.lower import Lowering
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify, verify
from pase.memory.residuals import kept

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {"a": jax.random.normal(KEYS[0], (64, 64)) / 8, "b": jax.random.normal(KEYS[1], (64, 128)) / 8}
X = jax.random.normal(KEYS[2], (128, 64))
LABELS = jax.random.randint(KEYS[3], (128,), 0, 128)


def expensive(p: Any, x: Any, labels: Any) -> Any:
    """Backward has three matmuls, while the derivative of forward has two."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        return jnp.clip(g, -1, 1) @ w.T, (x.T @ g) @ (w.T @ w)

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return jnp.mean(product(jnp.tanh(product(x, p["a"])), p["b"]) ** 2)


def cheap(p: Any, x: Any, labels: Any) -> Any:
    """Three matmuls forward, none backward."""

    @jax.custom_vjp
    def power(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w @ w @ w)

    power.defvjp(lambda x, w: (power(x, w), x), lambda x, g: (g * x, jnp.full((64, 64), jnp.mean(g))))
    return jnp.mean((power(x @ p["a"], p["a"]) @ p["b"]) ** 2)


def straight_through(p: Any, x: Any, labels: Any) -> Any:
    @jax.custom_vjp
    def rounded(w: Any) -> Any:
        return jnp.round(w * 8) / 8

    rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))
    return jnp.mean((x @ rounded(p["a"]) @ rounded(p["b"])) ** 2)


def fused_loss(chunks: int) -> Callable[..., Any]:
    """Cross-entropy over chunks of rows that computes its gradients forward, so that no logits are kept."""

    @jax.custom_vjp
    def loss(h: Any, w: Any, labels: Any) -> Any:
        return forward(h, w, labels)[0]

    def forward(h: Any, w: Any, labels: Any) -> Any:
        def one(so_far: Any, part: Any) -> Any:
            h, y = part
            z = h @ w
            total = jax.nn.logsumexp(z, -1)
            gradient = (jnp.exp(z - total[:, None]) - jax.nn.one_hot(y, z.shape[1])) / len(labels)
            value = jnp.mean(total - jnp.take_along_axis(z, y[:, None], 1)[:, 0]) / chunks
            return (so_far[0] + value, so_far[1] + h.T @ gradient), gradient @ w.T

        parts = h.reshape(chunks, -1, h.shape[1]), labels.reshape(chunks, -1)
        (value, of_w), of_h = jax.lax.scan(one, (0.0, jnp.zeros_like(w)), parts)
        return value, (of_h.reshape(h.shape), of_w)

    loss.defvjp(forward, lambda kept, g: (kept[0] * g, kept[1] * g, None))
    return lambda p, x, labels: loss(jnp.tanh(x @ p["a"]), p["b"], labels)


def equilibrium(p: Any, x: Any, labels: Any) -> Any:
    """Forward has two loops over weights of their own, and backward pulls back through the rule's own function."""

    def step(x: Any, w: Any, z: Any) -> Any:
        return jnp.tanh(z @ w + x)

    @jax.custom_vjp
    def solved(x: Any, w: Any, v: Any) -> Any:
        z = jax.lax.fori_loop(0, 3, lambda _, z: step(x, w, z), jnp.zeros_like(x))
        return jax.lax.fori_loop(0, 2, lambda _, z: step(x, v, z), z)

    def forward(x: Any, w: Any, v: Any) -> Any:
        z = solved(x, w, v)
        return z, (x, w, v, z)

    def backward(kept: Any, g: Any) -> Any:
        x, w, v, z = kept
        _, of_z = jax.vjp(lambda z: step(x, v, z), z)
        along = jax.lax.fori_loop(0, 2, lambda _, u: g + of_z(u)[0], g)
        of_x, of_v = jax.vjp(lambda x, v: step(x, v, z), x, v)[1](along)
        return of_x, jax.vjp(lambda w: step(x, w, z), w)[1](along)[0], of_v

    solved.defvjp(forward, backward)
    return jnp.mean((solved(x @ p["a"], p["a"], p["a"].T) @ p["b"]) ** 2)


PROGRAMS = {
    "expensive": expensive,
    "cheap": cheap,
    "straight_through": straight_through,
    "fused_loss": fused_loss(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_is_priced_by_the_rule(name: str) -> None:
    """All FLOPs agree with XLA, except those of exp, tanh and similar functions, which XLA counts separately."""
    fn = PROGRAMS[name]
    raw = verify(trace(fn, PARAMS, X, LABELS).graph)
    found = flops(fn, (PARAMS, X, LABELS), verify(named(simplify(raw))))
    assert found["flops"] == pytest.approx(1.0, rel=0.08)


@pytest.mark.parametrize("fn", [*PROGRAMS.values(), fused_loss(4)], ids=[*PROGRAMS, "chunks"])
def test_step_equals_unsharded(fn: Callable[..., Any]) -> None:
    check_step(fn, "annotated")


@pytest.mark.parametrize("fn", [fused_loss(4), equilibrium], ids=["chunks", "equilibrium"])
def test_a_rule_that_loops_is_lowered_by_hand(fn: Callable[..., Any]) -> None:
    check_step(fn, "manual")


def check_step(fn: Callable[..., Any], lowering: Lowering) -> None:
    plan = case_of(fn, PARAMS, X, LABELS).plan("ours@2x4")
    assert plan is not None and plan.collectives
    optimizer, args = optax.adam(1e-2, eps=1e-3), (PARAMS, X, LABELS)
    step = sharded_step(plan, optimizer, *args, lowering=lowering)
    off = unsharded_step(fn, optimizer, *args).differences(step)
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}


def test_what_forward_returns_is_kept_and_no_more() -> None:
    graph = simplify(trace(fused_loss(4), PARAMS, X, LABELS).graph)
    shapes = sorted(graph.tensors[t].shape for t in kept(graph))
    # the loss keeps its two gradients, tanh its result, and the first matmul the batch
    assert shapes == [(64, 128), (128, 64), (128, 64), (128, 64)]


def test_a_rule_within_a_rematerialised_layer_runs_backward_once() -> None:
    def loss(p: Any, x: Any, labels: Any) -> Any:
        layer = jax.checkpoint(lambda h, w: jnp.tanh(expensive({"a": w, "b": w}, h, labels) + h @ w))
        return jnp.mean(jax.lax.scan(lambda h, w: (layer(h, w), None), x, p)[0])

    graph = simplify(trace(loss, jnp.stack([PARAMS["a"]] * 3), X, LABELS).graph)
    ops = [op for n in graph.nodes for op in n.ops if op.kind == "matmul"]
    assert {op.remat for op in ops if op.backward} == {False} and {op.times for op in ops} == {3}
    assert sum(op.backward for op in ops) == 8 and any(op.remat for op in ops if not op.backward)


def test_inference_runs_no_rule() -> None:
    plan = pase.compile(expensive, PARAMS, X, LABELS, devices=8, mode="inference", baselines=False)
    assert not [n for n in plan.nodes if n.op in ("cotangent", "gradient")]


def test_the_rule_shares_the_batch() -> None:
    """Data parallelism sums each weight's gradient once. The rule returns the mean of its incoming gradient for every
    element, so only this scalar is summed."""
    plan = case_of(cheap, PARAMS, X, LABELS).plan("data_parallel")
    assert plan is not None
    summed = [c for c in plan.collectives if c.phase == "backward" and c.kind == "all_reduce"]
    assert sum(c.nbytes * c.times for c in summed) == 4 * (64 * 64 + 64 * 128 + 1)


def test_an_op_without_a_rule_is_named_in_the_users_backward() -> None:
    from jax.extend.core import Primitive

    unknown = Primitive("unheard_of")
    unknown.def_abstract_eval(lambda x: x)

    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return x * 2

    twice.defvjp(lambda x: (twice(x), x), lambda x, g: (unknown.bind(g),))
    with pytest.raises(PaseError, match="'unheard_of'") as e:
        trace(lambda p, x: jnp.sum(twice(x @ p["a"])), PARAMS, X)
    assert "test_custom_rules.py" in e.value.where


@jax.custom_vjp
def scored(x, w, ids):
    """The loss of each token, with a rule that returns half of its gradient."""
    logits = x @ w
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, ids[..., None], -1)[..., 0]


def _scored_back(kept, g):
    x, w, ids = kept
    p = (jax.nn.softmax(x @ w) - jax.nn.one_hot(ids, w.shape[1], dtype=x.dtype)) * g[..., None] / 2
    return p @ w.T, jnp.einsum("bsd,bsv->dv", x, p), None


scored.defvjp(lambda *args: (scored(*args), args), _scored_back)


@jax.custom_jvp
def normed(x, scale):
    """A norm, with a rule that treats the sum of squares as a constant and doubles the gradient of the scale."""
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1) * scale


@normed.defjvp
def _normed_jvp(primals, tangents):
    (x, scale), (dx, dscale) = primals, tangents
    r = jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1)
    return x * r * scale, dx * r * scale + 2 * x * r * dscale


def ruled_loss(params, batch):
    def layer(x, p):
        return x + jax.nn.silu(normed(x, p["scale"]) @ p["up"]) @ p["down"], None

    x = jax.lax.scan(jax.checkpoint(layer), params["table"][batch["ids"]], params["layers"])[0]
    return scored(jax.nn.softmax(x), params["table"].T, batch["next"]).mean()


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ours@2x4", "random1@2x4"])
def test_derivative_rules_of_the_users_are_kept(strategy):
    """Both kinds of rule sum over devices, and return something else than the derivative."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {
            "table": jnp.asarray(rng.normal(size=(32, 16)) / 2),
            "layers": {
                k: jnp.asarray(rng.normal(size=s) / 2)
                for k, s in {"scale": (2, 16), "up": (2, 16, 32), "down": (2, 32, 16)}.items()
            },
        }
        batch = {k: jnp.asarray(rng.integers(0, 32, (8, 8))) for k in ("ids", "next")}
        plan, optimizer = case_of(ruled_loss, params, batch).plan(strategy), optax.adam(1e-2, eps=1e-3)
        step = sharded_step(plan, optimizer, params, batch, lowering="manual")
        assert max(unsharded_step(ruled_loss, optimizer, params, batch).differences(step).values()) < 1e-12
