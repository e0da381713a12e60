"""A pipelined plan run stage by stage gives the unsharded step's loss, gradients and parameters, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.backends.jax.pipeline import run as jax_pipeline_run
from pase.backends.jax.pipeline.arrays import StackCut
from pase.errors import PaseError
from pase.hlo.collectives import collectives
from pase.pipeline.registry import schedule
from pase.plan.pipeline import ReplicaPlan, StagePlan
from pase.tables.itemize import split_of
from pase.tables.layouts import configs
from tests.pipeline.small import MICRO, OPTIMIZER, arguments, gpt, reference

pytestmark = pytest.mark.usefixtures("double")


@cache
def planned(scan, remat="none"):
    with jax.enable_x64(True):
        params, batch = arguments(scan)
        return pase.compile(
            gpt,
            params,
            batch,
            devices=8,
            machine="h100x8",
            pipeline=2,
            mesh="2x2",
            accumulate=MICRO,
            memory_limit="none",
            remat=remat,
        )


def staged(plan, name, chunks, cuts, seed=None):
    """The plan under another schedule with other cuts. seed: draws a random strategy for each stage."""
    p, ranks = plan.pipeline, schedule(name, 2, MICRO, chunks).rank_of
    first, middle, last = p.stages[0].strategy, p.stages[1].strategy, p.stages[-1].strategy
    which = [first, *[middle] * (len(cuts) - 2), last]
    strategies, again = p.strategies, p.recompute
    if seed is not None:
        rng, graph = np.random.default_rng(seed), plan.graph
        strategies = tuple(
            {n.name: split_of(n, rng.choice(configs(n, plan.mesh)), plan.mesh) for n in graph.nodes}
            for _ in which
        )
        which, again = range(len(cuts)), tuple(p.recompute[i] for i in which)
    stages = tuple(
        StagePlan(
            rank=rank,
            blocks=n,
            strategy=s,
            recomputes=False,
            weights="each" if rank else "hoisted",
            forward_s=1.0,
            backward_s=2.0,
            memory_bytes=1,
        )
        for k, (rank, n, s) in enumerate(zip(ranks, cuts, which, strict=True))
    )
    made = replace(
        p, schedule=name, chunks=chunks, cuts=cuts, stages=stages, strategies=strategies, recompute=again
    )
    return replace(plan, pipeline=made)


CASES = [
    ("1f1b", 1, (1, 3), True, "none", None),
    ("zb-h1", 1, (3, 1), True, "light", 1),
    ("zb-v", 2, (1, 1, 1, 1), False, "all", 3),
]


@pytest.mark.parametrize(("name", "chunks", "cuts", "scan", "remat", "seed"), CASES)
def test_step_equals_unsharded(name, chunks, cuts, scan, remat, seed):
    plan = staged(planned(scan, remat), name, chunks, cuts, seed)
    params, batch = arguments(scan)
    jp, whole = plan.jax, reference(scan)
    placed, there = jp.device_put(params, batch)
    _, grads = jp.value_and_grad()(placed, there)
    state = jp.init(OPTIMIZER, placed)
    step = jp.train_step(OPTIMIZER)
    updated, state, loss = step(placed, state, there)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12
    assert jax.tree.structure(updated) == jax.tree.structure(placed)
    *_, second = step(updated, state, there)
    assert float(second) < float(loss)
    assert (
        isinstance(placed["blocks"]["up"], StackCut)
        if scan
        else placed["blocks"][0]["up"].sharding.num_devices == 4
    )
    assert updated["wte"].sharding.num_devices == (4 if name == "zb-v" else 8)  # zb-v: both ends on one rank


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
    [("1f1b", (1, 3), True), pytest.param("zb-h1", (2, 2), False, marks=pytest.mark.minutes)],
)
def test_gradients_summed_once_a_step_equal_the_unsharded_ones(name, cuts, scan):
    """Each rank has tensor parallelism on the other axis."""
    plan = over_data(staged(planned(scan), name, 1, cuts), seed=5)
    jp, whole = plan.jax, reference(scan)
    params, batch = arguments(scan)
    placed, there = jp.device_put(params, batch)
    loss, grads = jp.value_and_grad()(placed, there)
    assert jp.unreduced_groups is not None and jp.unreduced_groups.many == 2
    assert abs(float(loss) - whole.loss) < 1e-12 and abs(float(jp.loss()(placed, there)) - whole.loss) < 1e-12
    assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    updated, *_ = jp.train_step(OPTIMIZER)(placed, jp.init(OPTIMIZER, placed), there)
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12


def test_backward_sends_no_gradients_where_they_are_summed_once(monkeypatch):
    """The compiled programs have no collective in backward, and one reduction of each stage's gradients after it."""
    sent, late = [], []
    run, mean = jax_pipeline_run._run_summing, jax_pipeline_run._mean_of

    def told(program, sums, values):
        text = program.run.lower(sums, [values[v] for v in program.reads]).compile().as_text()
        sent.extend(collectives(text))
        return run(program, sums, values)

    def means(*of):
        def at_last(sums):
            late.append(collectives(mean(*of).lower(sums).compile().as_text()))
            return mean(*of)(sums)

        return at_last

    monkeypatch.setattr(jax_pipeline_run, "_run_summing", told)
    monkeypatch.setattr(jax_pipeline_run, "_mean_of", means)
    w, x = jnp.full((4, 4, 4), 0.1), jnp.arange(64.0).reshape(16, 4) / 64

    def alone(params, x):
        return chain(params, x)[0]

    plan = pase.compile(alone, w, x, devices=4, machine="h100x8", pipeline=2, mesh="2", accumulate=MICRO)
    plan = over_data(staged(plan, "1f1b", 1, (1, 3)))
    loss, grads = plan.jax.value_and_grad()(w, x)
    want = jax.value_and_grad(alone)(w, x)
    assert abs(float(loss - want[0])) < 1e-14
    assert worst_difference(want[1], plan.jax.gathered(grads)) < 1e-14
    assert not sent
    assert [sum(c.bytes for c in of) for of in late] == [1 * 4 * 4 * 8, 3 * 4 * 4 * 8]


@cache
def on_four(scan):
    with jax.enable_x64(True):
        asked = {"pipeline": 2, "mesh": "2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
        return pase.compile(gpt, *arguments(scan), devices=4, machine="h100x8", **asked)


def replicas(plan, *of):
    """A plan of replicas on groups of four devices, with the given (micro-batches, schedule, cuts) of each."""

    def replica(many, name, cuts):
        p = staged(plan, name, 1, cuts).pipeline
        mesh = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
        stages = replace(p, micro_batches=many)
        return ReplicaPlan(group=f"group{many}", micro_batches=many, step_s=1.0, mesh=mesh, pipeline=stages)

    made = tuple(replica(*r) for r in of)
    return replace(plan, pipeline=replace(made[0].pipeline, replicas=made), accumulate=made[0].micro_batches)


def test_replicas_with_unequal_shares_equal_the_unsharded_step(scan=True):
    """One group has three micro-batches. Another has one, and its stages have other cuts."""
    jp = replicas(on_four(scan), (3, "1f1b", (1, 3)), (1, "gpipe", (3, 1))).jax
    params, batch = arguments(scan)
    whole = reference(scan)
    placed, there = jp.device_put(params, batch)
    loss, grads = jp.value_and_grad()(params, batch)
    assert abs(float(loss) - whole.loss) < 1e-12 and abs(float(jp.loss()(placed, there)) - whole.loss) < 1e-12
    step, state = jp.train_step(OPTIMIZER), jp.init(OPTIMIZER, placed)
    updated, state, loss = step(placed, state, there)
    assert abs(float(loss) - whole.loss) < 1e-12
    for r, mine, theirs in zip(jp.replicas, updated.parts, grads.parts, strict=True):
        assert worst_difference(whole.gradients, r.gathered(theirs)) < 1e-12
        assert worst_difference(whole.parameters, r.gathered(mine)) < 1e-12
    devices = [{d for x in jax.tree.leaves(part) for d in x.devices()} for part in updated.parts]
    assert [len(d) for d in devices] == [4, 4] and not devices[0] & devices[1]
    *_, second = step(updated, state, batch)
    assert float(second) < float(loss)
    with pytest.raises(PaseError, match=r"8 devices \(4 \+ 4\), but JAX sees 7"):
        jp.mesh(jax.devices()[:7])


def test_what_a_loss_returns_besides_is_stacked_over_the_replicas():
    plan, w, x, ((loss, aux), grads) = chained()
    jp = replicas(plan, (3, "1f1b", (1, 3)), (1, "1f1b", (2, 2))).jax
    (got, mine), found = jp.value_and_grad()(w, x)
    assert abs(float(got - loss)) < 1e-14 and mine["x"].shape == (MICRO,)
    assert float(jnp.sum(mine["x"]) - aux["x"]) == pytest.approx(0, abs=1e-12)
    assert worst_difference(grads, jp.gathered(found)) < 1e-14


def chain(params, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2), {"x": x.sum()}


@cache
def chained():
    with jax.enable_x64(True):
        w, x = (
            jnp.full((4, 4, 4), 0.3) * jnp.arange(1, 5)[:, None, None],
            jnp.arange(64.0).reshape(16, 4) / 64,
        )
        plan = pase.compile(chain, w, x, devices=2, machine="h100x8", pipeline=2, mesh="1", accumulate=MICRO)
        return plan, w, x, jax.value_and_grad(chain, has_aux=True)(w, x)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("eager-1f1b", 1), ("zb-h2", 1), ("interleaved", 2), ("dualpipev", 2)],
)
def test_every_schedule_runs_its_own_list(name, chunks):
    """The schedules that the test above leaves out, on a small chain. The function's aux is stacked."""
    plan, w, x, ((loss, _), grads) = chained()
    jp = staged(plan, name, chunks, (1,) * 4 if chunks == 2 else (2, 2)).jax
    (got, aux), mine = jp.value_and_grad()(w, x)
    assert abs(float(got - loss)) < 1e-14 and aux["x"].shape == (MICRO,)
    assert worst_difference(grads, jp.gathered(mine)) < 1e-14
    assert abs(float(jp.loss()(w, x)[0] - loss)) < 1e-14
    if name == "dualpipev":  # the second rank's two stages do the same with other layers
        programs = jp.on(None).programs
        assert programs[1] is programs[2] and len({id(p) for p in programs}) == 3


def roundabout(params, x):
    """A reverse loop with scaled stacks, a weight that all layers share, and results of every iteration."""
    gate = x @ params["shared"]

    def layer(h, w):
        h = jnp.tanh(h @ w["w"] + h @ params["shared"]) * gate + w["b"]
        return h, jnp.mean(h**2)

    stacks = {"w": params["w"] * 0.5, "b": params["b"]}
    h, norms = jax.lax.scan(layer, x, stacks, reverse=True)
    return jnp.mean(h**2) + jnp.sum(norms * jnp.arange(1.0, 5.0))


@pytest.mark.parametrize(("name", "chunks", "cuts"), [("1f1b", 1, (1, 3)), ("zb-v", 2, (1, 1, 1, 1))])
def test_what_stages_share_and_hand_on(name, chunks, cuts):
    rng = np.random.default_rng(1)
    params = {
        k: jnp.asarray(rng.normal(size=s)) for k, s in {"w": (4, 4, 4), "b": (4, 4), "shared": (4, 4)}.items()
    }
    x = jnp.asarray(rng.normal(size=(16, 4)))
    plan = pase.compile(
        roundabout, params, x, devices=2, machine="h100x8", pipeline=2, mesh="1", accumulate=MICRO
    )
    jp = staged(plan, name, chunks, cuts).jax
    loss, grads = jax.value_and_grad(roundabout)(params, x)
    with pytest.warns(UserWarning, match="several stages read shared"):
        got, mine = jp.value_and_grad()(params, x)
    assert abs(float(got - loss)) < 1e-12
    assert worst_difference(grads, jp.gathered(mine)) < 1e-12
    assert [p.shape[0] for p in mine["w"].parts] == list(cuts)[::-1]  # in the order of the layers
    assert mine["shared"].sharding.num_devices == 2 and jp.stages[-1].enters


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.lamb(1e-3), "each layer of 'params'"),
        (optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-3)), "random numbers"),
    ],
)
def test_an_optimizer_that_would_give_other_numbers_in_stages_is_refused(optimizer, why):
    plan, w, x, _ = chained()
    jp = staged(plan, "1f1b", 1, (2, 2)).jax
    with pytest.raises(PaseError) as e:
        jp.train_step(optimizer)(w, jp.init(optimizer, w), x)
    assert why in e.value.what and "choose an optimizer" in e.value.fix


def test_constants_in_an_optimizers_state_are_on_every_rank():
    plan, w, _, _ = chained()
    state = staged(plan, "1f1b", 1, (2, 2)).jax.init(optax.contrib.muon(1e-3), w)
    (coefficients,) = (x for x in jax.tree.leaves(state) if x.shape == (3,))
    np.testing.assert_allclose(coefficients, (3.4445, -4.775, 2.0315))


def test_what_it_cannot_run_is_said():
    plan, w, x, _ = chained()
    with pytest.raises(PaseError) as e:
        plan.jax.train_step(OPTIMIZER, lowering="manual")
    assert e.value.where == "lowering='manual'"
    with pytest.raises(PaseError, match="JAX sees 1"):
        plan.jax.mesh(jax.devices()[:1])
    with pytest.raises(PaseError) as e:
        plan.jax.in_shardings()
    assert e.value.where == "plan.jax.in_shardings"
    with pytest.raises(PaseError, match="shape"):
        plan.jax.device_put(w[:3], x)
