"""The circular schedule runs as one JAX program, with the unsharded loss, gradients and parameters, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.backends.audit.xla import worst_difference
from pase.compiler.stages.circular import circular_bound_s, circular_problem, circular_staged
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.menu import ONLY
from pase.compiler.stages.search import StageMenu
from pase.errors import Infeasible, PaseError
from pase.hlo.collectives import collectives
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.tables.itemize import split_of
from pase.tables.layouts import configs
from pase.zoo.attention import fused_attend
from tests.compiler.stages.staged import tables_of
from tests.pipeline.small import MICRO, OPTIMIZER, arguments, gpt, reference

pytestmark = pytest.mark.usefixtures("double")


@cache
def planned(ranks=2, mesh="2x2", remat="none"):
    with jax.enable_x64(True):
        asked = {"pipeline": ranks, "mesh": mesh, "accumulate": MICRO, "memory_limit": "none", "remat": remat}
        return pase.compile(gpt, *arguments(True), devices=8, machine="h100x8", **asked)


def circular(plan, strategy, weights):
    """The plan under the circular schedule with one strategy for all stages."""
    p = plan.pipeline
    n = sum(p.cuts) // p.degree
    one = replace(p.stages[0], blocks=n, strategy=0, weights=weights)
    made = replace(
        p,
        schedule="circular",
        chunks=1,
        cuts=(n,) * p.degree,
        stages=tuple(replace(one, rank=r) for r in range(p.degree)),
        strategies=(strategy,),
        recompute=p.recompute[:1],
    )
    return replace(plan, pipeline=made)


def drawn(plan, seed, data=None):
    """A random split of every node. data: an axis that must split the batch and no other dim of a computation."""
    rng = np.random.default_rng(seed)

    def split(n):
        every = [split_of(n, cfg, plan.mesh) for cfg in configs(n, plan.mesh)]
        if data is not None:
            has = "b" in {d.name for d in n.space}
            every = [
                s
                for s in every
                if all((data not in axes) or dim == "b" for dim, axes in s.items())
                and (data in s.get("b", ())) == has
            ]
        return every[rng.integers(len(every))]

    return {n.name: split(n) for n in plan.graph.nodes}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("ranks", "mesh", "remat", "seed", "lanes"),
    [
        (2, "2x2", "none", None, False),
        (2, "2x2", "light", 1, False),
        (2, "2x2", "none", 5, True),
        (4, "2", "all", 2, False),
    ],
)
def test_one_program_equals_the_unsharded_step(ranks, mesh, remat, seed, lanes):
    base = planned(ranks, mesh, remat)
    data = base.mesh.names[0] if lanes else None
    strategy = base.pipeline.strategies[0] if seed is None else drawn(base, seed, data)
    jp, whole = circular(base, strategy, "hoisted" if lanes else "each").jax, reference(True)
    params, batch = arguments(True)
    if lanes or ranks > 2:
        loss, grads = jax.jit(jp.value_and_grad())(params, batch)
        assert abs(float(loss) - whole.loss) < 1e-12
        assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    step = jp.train_step(OPTIMIZER)
    placed, there = jp.device_put(params, batch)
    updated, state, loss = step(placed, jp.init(OPTIMIZER, params), there)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12
    stack = updated["blocks"]["up"]
    assert stack.sharding.spec[0] == "stage" and stack.addressable_shards[0].data.shape[0] == 4 // ranks
    *_, second = step(updated, state, there)
    assert float(second) < float(loss)


@cache
def asked(**more):
    with jax.enable_x64(True):
        of = {
            "pipeline": 2,
            "stage_schedule": "circular",
            "mesh": "2x2",
            "accumulate": MICRO,
            "memory_limit": "none",
        }
        return pase.compile(gpt, *arguments(True), devices=8, machine="h100x8", **of, **more)


def test_a_plan_that_asks_for_it_says_so_and_runs():
    plan = asked(remat="none")
    p = plan.pipeline
    assert (p.schedule, p.cuts, len(p.strategies)) == ("circular", (2, 2), 1) and plan.bound <= plan.cost
    assert "as one program" in str(plan) and "under schedule 'circular'" in p.scope
    whole, (params, batch) = reference(True), arguments(True)
    updated, _, loss = plan.jax.train_step(OPTIMIZER)(params, plan.jax.init(OPTIMIZER, params), batch)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.parameters, plan.jax.gathered(updated)) < 1e-12


def ended(params, x):
    """Layers between two ends. Examples pass a value besides the carry, and the loss has company."""
    there = jax.nn.softmax(x @ params["first"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w + there), None), x @ params["start"], params["layers"])
    return jnp.mean((h @ params["last"] + there) ** 2), {"mean": h.mean(0), "positive": (h > 0).sum(-1)}


def over_data(weights, stored=False):
    """(the circular plan of ``ended`` whose mesh splits only the batch, its arguments). stored: whether parameters are
    stored in parts, too."""
    rng = np.random.default_rng(0)
    shapes = {"first": (4, 4), "start": (4, 4), "layers": (4, 4, 4), "last": (4, 4)}
    params = {k: jnp.asarray(rng.normal(size=s), "float32") for k, s in shapes.items()}
    given = params, jnp.asarray(rng.normal(size=(16, 4)), "float32")
    kinds = {"pipeline": 2, "mesh": "2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
    plan = pase.compile(ended, *given, devices=4, machine="h100x8", stage_schedule="circular", **kinds)
    (axis,) = plan.mesh.names
    split = {n.name: {"b": (axis,)} if "b" in {d.name for d in n.space} else {} for n in plan.graph.nodes}
    if stored:
        parameters = [n for n in plan.graph.nodes if n.kind == "parameter"]
        split |= {
            n.name: {[d.name for d in n.space if d.kind == "parallel"][-1]: (axis,)} for n in parameters
        }
    return circular(plan, split, weights), given


@pytest.mark.parametrize("weights", ["hoisted", "each"])
def test_it_sends_what_it_is_priced_for(weights):
    """Both activations that cross, in each iteration and from rank to rank at both ends, and back; gradients are summed
    once, or in each iteration."""
    plan, given = over_data(weights)
    jp = plan.jax
    run = jax.jit(jp.value_and_grad()).lower(*jp.device_put(*given)).compile()
    sent = collectives(run.as_text())
    p, m, activation = 2, MICRO, 16 // MICRO // 2 * 4 * 4
    times = 2 * ((m + p - 1) + 2 * m * (1 - 1 / p))
    assert sum(c.bytes * c.count for c in sent if c.kind == "permute") == 2 * times * activation
    summed = {c.count for c in sent if c.kind != "permute" and c.bytes >= 4 * 4 * 4}
    assert summed == {1} if weights == "hoisted" else summed > {1}


def test_weights_are_gathered_once_even_if_gradients_are_summed_each_time():
    """This was priced as a gather in each micro-batch."""
    plan, given = over_data("each", stored=True)
    run = jax.jit(plan.jax.value_and_grad()).lower(*plan.jax.device_put(*given)).compile()
    sent = collectives(run.as_text())
    assert {c.count for c in sent if c.kind == "all_gather"} == {1}
    assert min(c.count for c in sent if c.kind == "reduce_scatter") > 1
    priced = [
        tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4, w) for w in ("each", "hoisted")
    ]
    rng = np.random.default_rng(0)
    choice = np.array([rng.integers(len(c)) for c in priced[0].features.space.configs])
    each, once = (t.in_one_program().split_by(ONLY, choice).block for t in priced)
    for kind in (CostKind.BEFORE, CostKind.FORWARD_SENT):
        assert each[kind] == once[kind]
    assert each[CostKind.BEFORE] > 0 and each[CostKind.WEIGHT_SENT] > once[CostKind.WEIGHT_SENT]
    assert once[CostKind.SUMS] > each[CostKind.SUMS] == 0


def test_other_results_are_stacked_over_micro_batches():
    plan, (params, x) = over_data("hoisted")
    jp = plan.jax

    def whole(params):
        parts = [ended(params, x[i::MICRO]) for i in range(MICRO)]
        return sum(loss for loss, _ in parts) / MICRO, jax.tree.map(
            lambda *y: jnp.stack(y), *[a for _, a in parts]
        )

    wanted = jax.value_and_grad(whole, has_aux=True)(params)
    for of, got in [(wanted, jp.value_and_grad()(params, x)), (wanted[0], jp.loss()(params, x))]:
        assert worst_difference(of, jp.gathered(got)) < 1e-6


def test_it_has_one_lowering_and_its_loss_cannot_be_differentiated():
    plan, given = over_data("hoisted")
    with pytest.raises(PaseError, match="value_and_grad"):
        jax.grad(lambda *args: plan.jax.loss()(*args)[0])(*given)
    with pytest.raises(PaseError, match="lowered manually"):
        plan.jax.train_step(OPTIMIZER, lowering="annotated")


def attending(params, x):
    def layer(h, w):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", h, each) for each in w)
        return h + fused_attend(q, k, v, causal=True).reshape(h.shape), None

    h, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.mean((h @ params["last"]) ** 2)


def gated(params, x):
    """Layers take a branch by a flag of their own, and one branch has a mean over a dim that may be split."""

    def layer(h, w):
        of_mean, h = lambda h: jnp.tanh(h - h.mean(-1, keepdims=True)), h @ w["up"]
        return jax.lax.cond(w["flag"] > 0, of_mean, jnp.sin, h), None

    h, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return jnp.mean((h @ params["last"]) ** 2)


def drawn_circular(fn, layers, x, seed):
    """(the circular plan of a function with a drawn split, its parameters)"""
    rng = np.random.default_rng(0)
    shapes = {"first": (8, 8), "layers": layers, "last": (8, 8)}
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s) / 3), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    kinds = {"pipeline": 2, "mesh": "2x2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
    plan = pase.compile(fn, params, x, devices=8, machine="h100x8", stage_schedule="circular", **kinds)
    return circular(plan, drawn(plan, seed), "hoisted").jax, params


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [0, 2])
def test_attention_is_split_over_the_axes_of_a_rank(seed):
    """0: a ring of keys. 2: queries and heads. The ranks are an axis of the mesh before these."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8, 8)))
    jp, params = drawn_circular(attending, (4, 3, 8, 4, 2), x, seed)
    loss, grads = jp.value_and_grad()(params, x)
    wanted = jax.value_and_grad(attending)(params, x)
    assert abs(float(loss - wanted[0])) < 1e-6  # the kernel's sums are in float32
    assert worst_difference(wanted[1], jp.gathered(grads)) < 1e-6


def test_branches_in_which_devices_permute_are_refused():
    """Stages may take different branches, and a permute would wait for all of them for ever."""
    jp, params = drawn_circular(gated, {"up": (4, 8, 8), "flag": (4,)}, x := jnp.ones((16, 8)), 0)
    with pytest.raises(PaseError, match="different branches") as e:
        jp.value_and_grad()(params, x)
    assert "cond" in e.value.where and e.value.fix == "compile with pipeline='none'"


def test_without_a_named_schedule_it_is_tried_where_the_program_can_run_it():
    asked_for = {"pipeline": 2, "mesh": "2x2", "accumulate": MICRO, "memory_limit": "none", "remat": "none"}
    with jax.enable_x64(True):
        loop, written = (
            pase.compile(gpt, *arguments(scan), devices=8, machine="h100x8", **asked_for)
            for scan in (True, False)
        )
    tried = {loop.pipeline.schedule, *loop.pipeline.others}
    assert "circular" in tried and "under all schedules," in loop.pipeline.scope
    assert loop.bound <= loop.cost <= asked(remat="none").cost * (1 + 1e-9)
    assert "circular" not in {written.pipeline.schedule, *written.pipeline.others}
    assert "all schedules but 'circular'" in written.pipeline.scope


def test_a_rank_that_works_on_either_end_is_not_idle():
    """All ranks together work as long as a single rank would. The rest is bubble."""
    t = tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4, "hoisted")
    for ranks in (1, 2):
        menu, s = StageMenu([t], ranks, 4, np.inf, only="circular"), schedule("circular", ranks, 4)
        best, _ = circular_staged(menu, s, np.inf, ())
        alone, one = StageMenu([t], 1, 4, np.inf), schedule("1f1b", 1, 4)
        work = simulate(one, alone.problem(one, (best.split,)).times(np.array([4]))).busy
        done = best.cuts.simulated
        assert done.busy.sum() == pytest.approx(work.sum(), rel=1e-12) and len(done.busy) == ranks
        assert done.bubble == pytest.approx(1 - work.sum() / ranks / done.step_s, rel=1e-12)


@pytest.mark.parametrize("weights", ["hoisted", "each"])
def test_the_price_is_one_sum_over_nodes_and_edges_and_what_crosses(weights):
    """On one rank there are no transfers, so the bound is the step. On two ranks no split takes less than the bound."""
    t, rng = (
        tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4, weights),
        np.random.default_rng(0),
    )
    for ranks in (1, 2):
        menu, s = StageMenu([t], ranks, 4, np.inf, only="circular"), schedule("circular", ranks, 4)
        best, _ = circular_staged(menu, s, np.inf, ())
        assert best.cuts.counts == (4 // ranks,) * ranks
        if ranks == 1:
            assert best.cuts.simulated.step_s == pytest.approx(circular_bound_s(menu, s), rel=1e-9)
        for _ in range(10):
            choice = np.array([rng.integers(len(c)) for c in t.features.space.configs])
            step = step_of(menu, s, t.split_by(ONLY, choice))
            assert step >= circular_bound_s(menu, s) * (1 - 1e-9)


def test_no_split_that_fits_takes_less_than_the_bound_within_its_memory():
    """The limit is what the split itself needs: the bound is then tight at some of the prices that found it."""
    t, rng = (
        tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4, "hoisted"),
        np.random.default_rng(0),
    )
    s, prices = schedule("circular", 2, 4), (0.1, 0.5, 4.0)
    free = circular_bound_s(StageMenu([t], 2, 4, np.inf, only="circular"), s)
    priced = [
        t.in_one_program().cheapest(ONLY, 4, p * free / 1e8, 4) for p in (0.0, 1e-3, 0.01, 0.1, 0.3, 1, 3, 10)
    ]
    drawn = [np.array([rng.integers(len(c)) for c in t.features.space.configs]) for _ in range(10)]
    raised = 0
    for split in [*priced, *(t.split_by(ONLY, choice) for choice in drawn)]:
        rows, room = circular_problem(StageMenu([t], 2, 4, 1e15, only="circular"), s, split).memory_rows
        menu = StageMenu([t], 2, 4, float((1e15 - room + rows @ np.full(2, 2)).max()), only="circular")
        bound = circular_bound_s(menu, s, prices)
        assert bound <= step_of(menu, s, split) * (1 + 1e-9)
        raised += bound > free * 1.01
    assert raised and np.isinf(circular_bound_s(StageMenu([t], 2, 4, 1.0, only="circular"), s, prices))


def test_the_search_reads_what_the_bound_has_solved():
    t = tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4, "hoisted")
    menu, s, prices = StageMenu([t], 2, 4, 1e15, only="circular"), schedule("circular", 2, 4), (0.1, 4.0)
    circular_bound_s(menu, s, prices)
    solved = menu.spent.operations
    assert circular_staged(menu, s, np.inf, prices)[1] and menu.spent.operations == solved


def step_of(menu, s, split):
    return simulate(s, circular_problem(menu, s, split).times(np.full(s.stages, 4 // s.ranks))).step_s


def test_what_cannot_be_one_program_is_refused():
    with pytest.raises(PaseError, match="stage_schedule='circular'"):
        pase.compile(gpt, *arguments(True), devices=8, stage_schedule="circular")
    asked = {"devices": 2, "pipeline": 2, "baselines": False, "stage_schedule": "circular", "mesh": "1"}
    with pytest.raises(Infeasible, match="'circular'"):
        pase.compile(gpt, *arguments(True), accumulate=1, **asked)
    with pytest.raises(PaseError, match="one loop over its layers"):
        _ = pase.compile(gpt, *arguments(False), accumulate=MICRO, remat="none", **asked).jax
    base = planned()
    uneven = circular(base, base.pipeline.strategies[0], "hoisted")
    with pytest.raises(PaseError) as e:
        _ = replace(uneven, pipeline=replace(uneven.pipeline, cuts=(1, 3))).jax
    assert e.value.where == "the circular schedule" and "(1, 3)" in e.value.what
