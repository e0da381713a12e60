"""Stages on one device: what is sent in which program, gradients that are reduced once per step, and refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.backends.jax.pipeline import run as jax_pipeline_run
from pase.errors import PaseError
from pase.hlo.collectives import collectives
from pase.ir import named, simplify
from pase.ir.blocks import accumulated
from pase.ir.recompute import gathering_again
from pase.local.account import program_collectives
from pase.local.lower import program_of
from pase.tables.itemize import split_of
from pase.tables.layouts import configs
from tests.backends.jax.pipeline.staged import chain, planned, staged
from tests.pipeline.small import MICRO, OPTIMIZER, arguments, reference

pytestmark = pytest.mark.usefixtures("double")


def over_data(plan, seed=None):
    """The plan with the first mesh axis splitting only the batch, and weights gathered once per step.

    seed: draws random splits for the other axis.
    """
    rng, p, (data, *_) = np.random.default_rng(seed), plan.pipeline, plan.mesh.names

    def split(n):
        every = [split_of(n, cfg, plan.mesh) for cfg in configs(n, plan.mesh)]
        fits = [
            s
            for s in every
            if all((data in axes) == (dim == "b") for dim, axes in s.items() if data in axes or dim == "b")
            and (seed is not None or all(set(axes) <= {data} for axes in s.values()))
            and (data in s.get("b", ()) or "b" not in {d.name for d in n.space})
        ]
        return fits[rng.integers(len(fits))]

    strategies = tuple({n.name: split(n) for n in plan.graph.nodes} for _ in p.strategies)
    stages = tuple(replace(s, weights="hoisted") for s in p.stages)
    return replace(plan, pipeline=replace(p, strategies=strategies, stages=stages))


@pytest.mark.parametrize(
    ("name", "cuts", "scan"),
    [("1f1b", (1, 3), True), pytest.param("zb-h1", (2, 2), False, marks=pytest.mark.release)],
)
def test_gradients_summed_once_a_step_equal_the_unsharded_ones(name, cuts, scan):
    """Each rank has tensor parallelism on the other axis."""
    plan = over_data(staged(planned(scan), name, 1, cuts), seed=5)
    jp, whole = plan.jax, reference(scan)
    params, batch = arguments(scan)
    placed, there = jp.device_put(params, batch)
    loss, grads = jp.value_and_grad()(placed, there)
    assert abs(float(loss) - whole.loss) < 1e-12 and abs(float(jp.loss()(placed, there)) - whole.loss) < 1e-12
    assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    updated, *_ = jp.train_step(OPTIMIZER)(placed, jp.init(OPTIMIZER, placed), there)
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12


def alone(params, x):
    return chain(params, x)[0]


def test_backward_sends_no_gradients_where_they_are_summed_once(monkeypatch):
    """The compiled programs have no collective in backward, and one reduction of each stage's gradients after it."""
    sent = []
    run = jax_pipeline_run._run

    def told(program, values, sums):
        if sums:
            text = program.run.lower(sums, [values[v] for v in program.reads]).compile().as_text()
            sent.append(collectives(text))
        return run(program, values, sums)

    monkeypatch.setattr(jax_pipeline_run, "_run", told)
    w, x = jnp.full((4, 4, 4), 0.1), jnp.arange(64.0).reshape(16, 4) / 64
    plan = pase.compile(
        alone, w, x, devices=4, machine="h100x8", pipeline=2, baselines=False, mesh="2", accumulate=MICRO
    )
    jp = over_data(staged(plan, "1f1b", 1, (1, 3))).jax
    loss, grads = jp.value_and_grad()(w, x)
    want = jax.value_and_grad(alone)(w, x)
    assert abs(float(loss - want[0])) < 1e-14
    assert worst_difference(want[1], jp.gathered(grads)) < 1e-14
    assert len(sent) == 2 * MICRO and not any(sent)
    programs, (placed,) = jp.on(None).programs, jp.device_put(w)
    late = [
        collectives(p.finish.lower([part], p.zeros([part])).compile().as_text())
        for p, part in zip(programs, placed.parts, strict=True)
    ]
    assert [sum(c.bytes for c in of) for of in late] == [1 * 4 * 4 * 8, 3 * 4 * 4 * 8]


def mlp(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w["up"]) @ w["down"] + h, None

    h, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.mean((h @ params["last"]) ** 2)


def sent(compiled):
    """Kind of collective -> its bytes in a step."""
    out = Counter()
    for c in collectives(compiled.as_text()):
        out[c.kind] += c.bytes * c.count
    return out


def planned_bytes(jp, graph):
    """Kind of collective -> its bytes in forward and backward, as they are priced."""
    out = Counter()
    for c in program_collectives(program_of(graph, jp.splits[0].logical_mesh, jp.splits[0].strategy)):
        out[c.kind] += c.nbytes * c.times * (c.phase != "update")
    return out


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("seed", "weights", "name"),
    [(2, "hoisted", "1f1b"), (2, "each", "1f1b"), (4, "each", "zb-h1"), (6, "each", "1f1b")],
)
def test_stages_send_what_the_model_without_stages_sends(seed, weights, name, monkeypatch):
    """To the byte, under one strategy: each stage sends the collectives of its part of the local program. What was sent
    of the batch was sent again for backward. Weights that are gathered in each micro-batch are gathered again for its
    backward, and this was not priced."""
    shapes = {"first": (8, 8), "layers": {"up": (4, 8, 16), "down": (4, 16, 8)}, "last": (8, 8)}
    w = jax.tree.map(lambda s: jnp.full(s, 0.1), shapes, is_leaf=lambda s: isinstance(s, tuple))
    x = jnp.arange(128.0).reshape(16, 8) / 128
    asked = {"pipeline": 2, "mesh": "2x2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
    plan = staged(pase.compile(mlp, w, x, devices=8, machine="h100x8", **asked), name, 1, (1, 3))
    rng, p = np.random.default_rng(seed), plan.pipeline
    split = {n.name: split_of(n, rng.choice(configs(n, plan.mesh)), plan.mesh) for n in plan.graph.nodes}
    stages = tuple(replace(s, strategy=0, weights=weights) for s in p.stages)
    jp = replace(plan, pipeline=replace(p, strategies=(split,), stages=stages, recompute=p.recompute[:1])).jax
    total, of, run = Counter(), {}, jax_pipeline_run._run

    def told(program, values, sums):
        if program not in of:
            of[program] = sent(program.run.lower(sums, [values[v] for v in program.reads]).compile())
        total.update(of[program])
        return run(program, values, sums)

    def finished(finish):
        def counted(weights, sums):
            total.update(sent(finish.lower(weights, sums).compile()))
            return finish(weights, sums)

        return counted

    running = jp.on(None)
    monkeypatch.setattr(jax_pipeline_run, "_run", told)
    made = tuple(replace(q, finish=finished(q.finish)) for q in running.programs)
    monkeypatch.setitem(running.__dict__, "programs", made)
    jp.value_and_grad()(*jp.device_put(w, x))
    alone = replace(jp.splits[0], hoisted="all" if weights == "hoisted" else "none")
    mesh = alone.mesh(jax.devices()[:4])
    step = jax.jit(alone.value_and_grad(mesh, lowering="manual"))
    want = sent(step.lower(*alone.device_put(w, x, mesh=mesh)).compile())
    if weights == "each":
        micro = accumulated(named(simplify(jp.traced.graph)), MICRO)
        again = planned_bytes(jp, gathering_again(micro)) - planned_bytes(jp, micro)
        assert again.total()
        want += again
    assert total == want and len(total) > 2


def constant_in_carry(params, x):
    """A carry that no layer changes, and one that counts."""

    def layer(carried, w):
        h, scale, i = carried
        return (jnp.tanh(h @ w) * scale + i, scale, i + 1), None

    (h, *_), _ = jax.lax.scan(layer, (x, 0.5, 0), params)
    return jnp.mean(h**2)


def test_a_constant_in_the_carry_is_handed_on():
    w, x = jnp.full((4, 4, 4), 0.1), jnp.arange(64.0).reshape(16, 4) / 64
    plan = pase.compile(
        constant_in_carry,
        w,
        x,
        devices=4,
        machine="h100x8",
        pipeline=2,
        baselines=False,
        mesh="2",
        accumulate=MICRO,
    )
    jp = staged(plan, "1f1b", 1, (1, 3)).jax
    loss, grads = jp.value_and_grad()(w, x)
    want = jax.value_and_grad(constant_in_carry)(w, x)
    assert abs(float(loss - want[0])) < 1e-14
    assert worst_difference(want[1], jp.gathered(grads)) < 1e-14


def printing(params, x):
    def layer(h, w):
        jax.debug.print("{}", h[0, 0])
        return jnp.tanh(h @ w), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def test_what_cannot_be_lowered_manually_is_refused_in_stages():
    """It was dropped in silence: a stage's programs are cut by what their results need."""
    w, x = jnp.full((4, 4, 4), 0.1), jnp.arange(64.0).reshape(16, 4) / 64
    plan = pase.compile(
        printing, w, x, devices=2, machine="h100x8", pipeline=2, baselines=False, mesh="1", accumulate=MICRO
    )
    with pytest.raises(PaseError, match="cannot be run in stages") as e:
        staged(plan, "1f1b", 1, (2, 2)).jax.value_and_grad()(w, x)
    assert "debug" in e.value.where and "test_device.py" in e.value.where and "pipeline='none'" in e.value.fix
