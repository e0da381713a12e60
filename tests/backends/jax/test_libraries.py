"""Models written with Flax and Equinox: their sharded steps equal the unsharded ones."""

import jax
import jax.numpy as jnp
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import sharded_step, unsharded_step

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
X, Y = jax.random.normal(jax.random.key(1), (8, 16)), jnp.arange(8) % 4


def _cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def _nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.gelu(self.norm(self.inner(x))))

    graphdef, state = nnx.split(Net(nnx.Rngs(0)))
    return lambda state, x: _cross_entropy(nnx.merge(graphdef, state)(x)), state


def _linen():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(32)(x))
            x = x.reshape(len(x), 4, 8)
            x = nn.MultiHeadDotProductAttention(num_heads=2)(x)
            return nn.Dense(4)(x.reshape(len(x), -1))

    net = Net()
    return lambda params, x: _cross_entropy(net.apply(params, x)), net.init(jax.random.key(0), X)


def _equinox():
    import equinox as eqx

    net = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(net, eqx.is_array)
    return lambda arrays, x: _cross_entropy(jax.vmap(eqx.combine(arrays, static))(x)), arrays


@pytest.mark.parametrize("make", [_nnx, _linen, _equinox], ids=["flax_nnx", "flax_linen", "equinox"])
def test_modules_end_to_end(make):
    loss_fn, params = make()
    plan = case_of(loss_fn, params, X).plan("ours@2x4")
    assert any(c.nbytes > 4 for c in plan.collectives), "this plan sends no data, so it tests nothing"
    step = sharded_step(plan, OPTIMIZER, params, X)
    off = unsharded_step(loss_fn, OPTIMIZER, params, X).differences(step)
    assert max(off.values()) < 1e-5, off
    assert jax.tree.structure(step.parameters) == jax.tree.structure(params)
