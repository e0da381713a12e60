"""Steps with hoisted all-gathers of parameters and gradient reductions.

The numbers are those of the unsharded step, and the collectives are the plan's, to the byte.
"""

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import case_of
from pase.api import Plan
from pase.backends.audit.xla import compare, sharded_step, unsharded_step
from pase.baselines import masks
from pase.compiler.meshes.baselines import price_baselines
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.variants import Variant
from pase.errors import PaseError
from pase.plan.layout import from_json, to_json

LAYERS, D, VOCAB = 3, 16, 32


def layer(x, w):
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["scale"]
    return x + jnp.tanh(y @ w["up"]) @ w["down"]


def looped(params, tokens):
    """A loop that slices a stack of weights, and an embedding that is read twice."""
    x = params["table"][tokens]
    x = jax.lax.scan(lambda h, w: (layer(h, w), None), x, params["layers"])[0]
    return (jax.nn.logsumexp(x @ params["table"].T, -1)).mean()


def unrolled(params, tokens):
    """The same model written out, with separate weights for each layer that are cast where they are used."""
    x = params["table"][tokens]
    for i in range(LAYERS):
        x = layer(x, {k: params[f"{k}{i}"].astype("float32") for k in ("scale", "up", "down")})
    return (jax.nn.logsumexp(x @ params["table"].T, -1)).mean()


def rematerialised(params, tokens):
    x = params["table"][tokens]
    again = jax.checkpoint(lambda h, w: (layer(h, w), None))
    x = jax.lax.scan(again, x, params["layers"])[0]
    return (jax.nn.logsumexp(x @ params["table"].T, -1)).mean()


@pytest.fixture(scope="module")
def drawn():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape) / 4)

        layers = {
            "scale": draw(LAYERS, D),
            "up": draw(LAYERS, D, 4 * D),
            "down": draw(LAYERS, 4 * D, D),
        }
        apart = {f"{k}{i}": v[i] for k, v in layers.items() for i in range(LAYERS)}
        table = draw(VOCAB, D)
        yield (
            {"table": table, "layers": layers},
            {"table": table, **apart},
            jnp.asarray(rng.integers(0, VOCAB, (32, 8))),
        )


def planned(fn, params, tokens, method, k):
    """A function f(once) that returns the plan of a baseline on 8 devices."""
    case = case_of(fn, params, tokens, name=fn.__name__)
    with patch.object(masks, "PERSISTENT_ELEMENTS", 0):  # so that FSDP also splits small parameters
        given = next(b for b in price_baselines(case.problem)[0] if b.name == method)

    def of(once):
        problem = case.problem.varied(case.traced, Variant(accumulate=k, hoisted=once))
        return Plan.of(plan_of(problem, given.strategy, given.mesh, fn.__name__, case.traced))

    return of


def ruled(params, x):
    """Its derivative rule is a local program of its own, whose transfers are numbered from 0, like the model's."""

    @jax.custom_vjp
    def normed(x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1)

    normed.defvjp(lambda x: (normed(x), x), lambda x, g: (g * jnp.mean(x**2, -1, keepdims=True),))
    h = x @ params["a"]
    return jnp.mean(normed(normed(h) @ params["b"]) ** 2)


def test_a_derivative_rule_does_not_read_the_models_gathered_parameters():
    """A transfer of the rule's program was taken for the model's transfer of that number, and read its parameter."""
    with jax.enable_x64(True):
        a, b, x = jax.random.normal(jax.random.key(0), (3, 32, 32))
        params = {"a": a, "b": b}
        plan = planned(ruled, params, x, "fsdp", 2)("all")
        step = sharded_step(plan, optax.sgd(0.1), params, x, lowering="manual")
        assert max(unsharded_step(ruled, optax.sgd(0.1), params, x).differences(step).values()) < 1e-10


def sent(plan):
    return sum(c.nbytes * c.times for c in plan.collectives)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("fn", "method", "k", "once"),
    [
        (looped, "fsdp", 4, "all"),
        (unrolled, "zero2", 2, "all"),
        (unrolled, "fsdp", 2, "gathers"),
        (rematerialised, "fsdp", 2, "all"),
        (rematerialised, "fsdp", 1, "gathers"),
    ],
)
def test_numbers_and_bytes(drawn, fn, method, k, once):
    with jax.enable_x64(True):
        stacked, apart, tokens = drawn
        params = apart if fn is unrolled else stacked
        of = planned(fn, params, tokens, method, k)
        plan, optimizer = of(once), optax.adam(1e-2, eps=1e-3)
        step = sharded_step(plan, optimizer, params, tokens)
        assert max(unsharded_step(fn, optimizer, params, tokens).differences(step).values()) < (
            1e-6 if fn is unrolled else 1e-12
        )
        rows = compare(plan, step.compiled, "manual")
        assert {r.kind: r.compiled for r in rows} == {r.kind: r.predicted for r in rows}
        assert 0 < sent(plan) < sent(of("none"))
        assert from_json(to_json(plan), "it").once == once
        assert plan.communication < of("none").communication
        assert plan.memory.total > of("none").memory.total


def test_what_cannot_be_sent_once_is_refused(drawn):
    _, apart, tokens = drawn
    plan = planned(unrolled, apart, tokens, "fsdp", 2)("all")
    with pytest.raises(PaseError) as e:
        plan.jax.value_and_grad(lowering="annotated")
    assert e.value.where == "lowering='annotated'" and "once='none'" in e.value.fix
    small = {"devices": 2, "baselines": False}
    with pytest.raises(PaseError, match="accumulate"):
        pase.compile("zoo:mlp", once="all", accumulate=1, **small)
    with pytest.raises(PaseError, match="not trained"):
        pase.compile(unrolled, apart, tokens, once="all", mode="inference", **small)


def branching(params, x):
    """A branch that is rematerialised in backward."""
    again = jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h)))
    y = jax.lax.cond(params["v"][0, 0] > 0, again, lambda h: h, x @ params["w"])
    return jnp.mean((y @ params["v"]) ** 2)


def test_what_a_branch_computes_again_stays_so(drawn):
    params, x = {"w": jnp.ones((16, 16)), "v": jnp.ones((16, 16))}, jnp.ones((32, 16))
    plan = planned(branching, params, x, "fsdp", 2)("all")
    step = str(jax.make_jaxpr(plan.jax.value_and_grad(plan.jax.mesh()))(params, x))
    assert "checkpoint" in step or "remat" in step


def turning(params, x):
    """A weight that the iterations of a while loop read."""
    turned = jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ params["w"])), (0, x)
    )[1]
    return jnp.mean((jax.lax.stop_gradient(turned) @ params["v"]) ** 2)


def test_a_parameter_inside_of_a_while_loop(drawn):
    """The loop's body reads the parameter unchanged, so it is gathered once, before the loop."""
    with jax.enable_x64(True):
        w = jnp.arange(256.0).reshape(16, 16) / 512
        params, x = {"w": w, "v": w.T}, jnp.arange(512.0).reshape(32, 16) / 512
        plan, optimizer = planned(turning, params, x, "fsdp", 2)("all"), optax.sgd(1e-2)
        step = sharded_step(plan, optimizer, params, x)
        assert max(unsharded_step(turning, optimizer, params, x).differences(step).values()) < 1e-12
        assert {r.compiled - r.predicted for r in compare(plan, step.compiled, "manual")} == {0}
