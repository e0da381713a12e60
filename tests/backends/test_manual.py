"""Steps lowered by hand: the numbers of the unsharded step, and the plan's own collectives, to the byte.

Bytes are those of the compiled program, reduce-scatters among them: nothing is allowed for. A blind strategy may ask
for one move twice, which XLA then does once: there the program may send less, never more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import TOLERANCE, case_of, measured, reduced
from pase.backends.jax_values import NotByHand
from pase.backends.to_jax import jax_plan
from pase.backends.truth import compare, sharded_step, unsharded_step
from pase.errors import PaseError

EXACT = [
    ("mlp", "zero2"),
    ("mlp", "ours@2x2x2"),
    ("mlp", "random1@2x4"),
    ("llama3_8b", "megatron/megatron_sp_2x4"),
    ("mixtral_8x7b", "ours@2x4"),
]


@pytest.mark.parametrize(("model", "strategy"), EXACT, ids=lambda x: x.split("/")[-1])
def test_numbers_and_bytes_are_the_plans(model, strategy):
    off, rows = measured(model, strategy, "manual")
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}
    assert {r.kind: r.compiled for r in rows} == {r.kind: r.predicted for r in rows}
    assert sum(r.compiled for r in rows) > 1000


def block(x, p):
    """A layer with all that a language model has: norm, attention with a mask, two products."""
    y = x - x.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * p["scale"]
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p["qkv"][i]) for i in range(3))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, p["out"])
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def loss(params, batch):
    tokens = batch["tokens"]
    x = params["table"][tokens] + params["positions"]
    layer = jax.checkpoint(lambda x, p: (block(x, p), None))
    x = jax.lax.scan(layer, x, params["layers"])[0]
    logits = x @ params["table"].T
    picked = jnp.take_along_axis(logits, batch["next"][..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


@pytest.fixture(scope="module")
def decoder():
    """A small decoder in float64, its step on one device, and its splits."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        d, h, vocab, layers = 16, 4, 32, 2

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape) / 4)

        params = {
            "table": draw(vocab, d),
            "positions": draw(8, d),
            "layers": {
                "scale": draw(layers, d),
                "qkv": draw(layers, 3, d, h, 4),
                "out": draw(layers, h, 4, d),
                "up": draw(layers, d, 32),
                "down": draw(layers, 32, d),
            },
        }
        batch = {k: jnp.asarray(rng.integers(0, vocab, (8, 8))) for k in ("tokens", "next")}
        whole = unsharded_step(loss, optax.adam(1e-2, eps=1e-3), params, batch)
        yield case_of(loss, params, batch), params, batch, whole


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "ours@2x4", *(f"random{k}@2x2x2" for k in (1, 2))])
def test_in_float64_the_steps_are_equal(decoder, strategy):
    case, params, batch, whole = decoder
    with jax.enable_x64(True):
        plan = case.plan(strategy)
        step = sharded_step(plan, optax.adam(1e-2, eps=1e-3), params, batch, lowering="manual")
        assert max(whole.differences(step).values()) < 1e-12
        for row in compare(plan, step.compiled, "manual"):
            assert row.compiled == row.predicted or ("random" in strategy and row.compiled < row.predicted)


def test_the_loss_alone_is_the_functions(decoder):
    case, params, batch, whole = decoder
    with jax.enable_x64(True):
        jp = jax_plan(case.plan("random1@2x2x2"))
        value = jax.jit(jp.loss(lowering="manual"))(*jp.device_put(params, batch))
        assert abs(float(value) - whole.loss) < 1e-12
        with pytest.raises(PaseError, match="value_and_grad"):
            jax.grad(jp.loss(lowering="manual"))(*jp.device_put(params, batch))


def test_what_cannot_be_lowered_is_named_and_auto_leaves_it_to_xla():
    plan = reduced("rnnlm").plan("random1@2x4")
    with pytest.raises(NotByHand, match=r"moved inside of the loop.*lowering='annotated'"):
        plan.jax.lower_train_step(optax.sgd(0.1), lowering="manual")
    with pytest.warns(UserWarning, match="moved inside of the loop"):
        plan.jax.value_and_grad(lowering="auto")
