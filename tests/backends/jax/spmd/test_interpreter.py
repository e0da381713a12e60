"""The walk over a manually lowered program: one trace, defects that it finds, and the gradients of parameters.

ZeRO-2 keeps a parameter replicated and its gradient split, so each derivative is taken at a part of the value.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step, unsharded_step
from pase.backends.jax.spmd.interpreter import ManualWalk
from pase.errors import PaseError
from pase.tables.axis_layout import AxisLayout


def test_auto_traces_the_step_once(monkeypatch):
    """It is the manual step if the whole program can be lowered, which the step's own tracing finds out."""
    plan = case_of(lambda p, x: jnp.sum((x @ p) ** 2), jnp.ones((8, 8)), jnp.ones((8, 8))).plan("fsdp")
    walks, run = [], ManualWalk.run
    monkeypatch.setattr(ManualWalk, "run", lambda self, *given: walks.append(given[3]) or run(self, *given))
    text = plan.jax.lower_train_step(optax.sgd(0.1)).as_text()
    assert walks == [""] and "sdy.manual_computation" in text and "stablehlo.reduce_scatter" in text


def test_a_defect_of_ours_names_the_way_on_and_the_default_takes_it(monkeypatch):
    """A value in another layout than its reader expects stops a step that must be lowered manually, and no other."""
    params, batch = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}, jnp.ones((8, 8))

    def mean(p, x):
        return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)

    plan = case_of(mean, params, batch).plan("data_parallel")
    program = plan.jax.program
    wrong = next(o for op in program.ops for o in op.operands if o.transfer is None and not o.constant)
    held = AxisLayout(None if s == (0, 8) else (0, 8) for s in wrong.layout)

    def moved(op):
        operands = tuple(replace(o, layout=held) if o is wrong else o for o in op.operands)
        return replace(op, operands=operands)

    broken = replace(program, ops=tuple(map(moved, program.ops)))
    monkeypatch.setitem(vars(plan.jax), "program", broken)
    with pytest.raises(PaseError) as e:
        plan.jax.lower_train_step(optax.sgd(0.1), lowering="manual")
    assert "defect of pase.local" in e.value.what and "lowering='annotated'" in e.value.fix
    with pytest.warns(UserWarning, match=r"defect of pase\.local.* left to XLA"):
        plan.jax.lower_train_step(optax.sgd(0.1))


D, B = 16, 16
SEEN = jnp.asarray(np.tril(np.ones((D, D))))

TRANSFORMS = {
    "linear": lambda w: 2 * w,
    "exp": jnp.exp,
    "decay": lambda w: -jnp.exp(w) / 4,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "square": jnp.square,
    "power": lambda w: w**3,
    "sin": jnp.sin,
    "rsqrt": lambda w: jax.lax.rsqrt(2 + w),
    "reciprocal": lambda w: 1 / (3 + w),
    "log": lambda w: jnp.log(3 + w),
    "erf": jax.lax.erf,
    "absolute": jnp.abs,
    "clipped": lambda w: jnp.clip(w, -0.5, 0.5),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "transposed": lambda w: jnp.tanh(w.T).T,
    "reshaped": lambda w: jnp.exp(w.reshape(4, -1)).reshape(w.shape),
    "normed": lambda w: w / jnp.sqrt((w * w).sum(0) + 1e-3),
    "normed_rows": lambda w: w / jnp.sqrt((w * w).sum(1, keepdims=True) + 1e-3),
    "standardised": lambda w: (w - w.mean(0)) * jax.lax.rsqrt(w.var(0) + 1e-3),
    "softmax": lambda w: 4 * jax.nn.softmax(w, -1),
    "logsumexp": lambda w: w - jax.nn.logsumexp(w, 0),
    "cumulative": lambda w: jnp.cumsum(jnp.tanh(w), 1) / 4,
    "sorted": lambda w: jnp.sort(jnp.exp(w), 0),
    "largest": lambda w: jnp.where(w >= jax.lax.top_k(w, 4)[0][:, -1:], jnp.exp(w), 0),
    "by_itself": lambda w: w * w,
    "product": lambda w: w @ jnp.tanh(w),
    "stopped": lambda w: jax.lax.stop_gradient(jnp.exp(w)) * jnp.sin(w),
    "straight_through": lambda w: w + jax.lax.stop_gradient(jnp.round(4 * w) / 4 - w),
    "masked": lambda w: jnp.exp(w) * SEEN,
    "checkpointed": jax.checkpoint(lambda w: jnp.exp(jnp.sin(w))),
}
"""Name -> the function of a square weight that a matmul reads."""


def loss(params, batch):
    """Applies every transform to its own weight, and some functions to a slice of a stack in a loop."""
    out = batch["y"]
    for name, w in params["one"].items():
        out = out + jnp.tanh(batch["x"] @ TRANSFORMS[name](w))

    def layer(x, p):
        return x + 0.1 * jnp.tanh(x @ jnp.exp(p["w"])) * jax.nn.sigmoid(p["gate"]), None

    out = jax.lax.scan(jax.checkpoint(layer), out, params["layers"])[0]
    return (out**2).mean()


@pytest.fixture(scope="module")
def model():
    """(case, params, batch, the step on one device)."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape) / 2)

        params = {
            "one": {name: draw(D, D) for name in TRANSFORMS},
            "layers": {"w": draw(3, D, D), "gate": draw(3, D)},
        }
        batch = {"x": draw(B, D), "y": draw(B, D)}
        whole = unsharded_step(loss, optax.adam(1e-2, eps=1e-3), params, batch)
        yield case_of(loss, params, batch), params, batch, whole


def off(grads, wanted):
    """Leaf -> the largest error of its gradient, relative to the largest element."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True)
    return {
        jax.tree_util.keystr(path): float(np.abs(np.asarray(g) - w).max() / np.abs(w).max())
        for (path, g), w in pairs
    }


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["zero2", "random1@2x2x2"])
def test_every_transform_has_the_gradient_of_one_device(model, strategy):
    case, params, batch, whole = model
    with jax.enable_x64(True):
        plan = case.plan(strategy)
        step = sharded_step(plan, optax.adam(1e-2, eps=1e-3), params, batch, lowering="manual")
        assert {k: e for k, e in off(step.gradients, whole.gradients).items() if e > 1e-9} == {}
        for row in compare(plan, step.compiled, "manual"):
            assert row.compiled == row.predicted or ("random" in strategy and row.compiled < row.predicted)


def test_the_default_plan_has_it(model):
    """By default, value and gradient have different layouts if this is cheaper."""
    _, params, batch, whole = model
    with jax.enable_x64(True):
        plan = pase.compile(loss, params, batch, devices=8, machine="h100x8")
        assert any(p.storage != p.state for p in plan.parameters.values())
        grads = plan.jax.value_and_grad()(*plan.jax.device_put(params, batch))[1]
        assert {k: e for k, e in off(grads, whole.gradients).items() if e > 1e-9} == {}


held = jax.lax.stop_gradient

READ_TWICE = {
    "held first": lambda h, v: held(h) @ v * (h @ v),
    "held second": lambda h, v: h @ v * (held(h) @ v),
    "weight held first": lambda h, v: h @ held(v) * (h @ v),
    "weight held second": lambda h, v: h @ v * (h @ held(v)),
    "target": lambda h, v: (jnp.tanh(h @ v) - held(jnp.sin(h @ v))) ** 2,
    "recomputed, then held": lambda h, v: jax.checkpoint(lambda h: jnp.sin(h @ v))(h) * held(h @ v),
    "held in what is recomputed": lambda h, v: h @ v + jax.checkpoint(lambda h: held(h) * jnp.sin(h))(h) @ v,
    "in a loop": lambda h, v: jax.lax.scan(
        lambda c, _: (jnp.tanh(c @ v) + held(c @ v), None), h, None, length=2
    )[0],
    "in a branch": lambda h, v: jax.lax.cond(
        h.sum() > 0, lambda h: held(h) @ v * h, lambda h: h @ v * jnp.sin(h), h
    ),
    "Newton": lambda h, v: (lambda y: y - (y * y - jnp.exp(h @ v)) / (2 * y))(
        held(
            jax.lax.fori_loop(
                0, 3, lambda _, y: y - (y * y - held(jnp.exp(h @ v))) / (2 * y), jnp.ones_like(h @ v)
            )
        )
    ),
}
"""Values with two readers, one of them behind ``stop_gradient`` or in a region that backward recomputes."""


def test_a_value_that_has_moved_is_kept_with_its_gradient():
    def of(params, batch):
        h = jnp.tanh(batch @ params["w"])
        return sum((f(h, params["v"][name]) ** 2).mean() for name, f in READ_TWICE.items())

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {name: jnp.asarray(rng.normal(size=(D, D)) / 2) for name in READ_TWICE}
        params = {"w": jnp.asarray(rng.normal(size=(D, D)) / 2), "v": params}
        batch, optimizer = jnp.asarray(rng.normal(size=(B, D))), optax.sgd(1e-2)
        whole = unsharded_step(of, optimizer, params, batch)
        step = sharded_step(
            case_of(of, params, batch).plan("random1@2x2x2"), optimizer, params, batch, lowering="manual"
        )
        assert {k: e for k, e in off(step.gradients, whole.gradients).items() if e > 1e-9} == {}
