"""Models without equal blocks are cut at their cut points: the same search over ranges of units. They also run."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.backends.audit.xla import unsharded_step, worst_difference
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.resolve import traced_model
from pase.compiler.stages.chain_places import UnitPlaces, divided
from pase.compiler.stages.chain_search import ChainMenu
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.menu import RUN, StageDevices, StageRole, StageTables
from pase.compiler.stages.places import Places
from pase.errors import Infeasible
from pase.frontends.jax.blocks import blocks_of
from pase.machine import Mesh
from pase.pipeline.ranges import RangeProblem, RangeWay, best_ranges, runs_of
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes, simulate
from pase.pipeline.types import StageTimes
from pase.search.check import cost_of
from tests.pipeline.small import BATCH, MICRO, OPTIMIZER, SEQ, VOCAB, D, norm

pytestmark = pytest.mark.usefixtures("double")


def attend(x, y, p):
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["q"], y @ p["k"])
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), y @ p["v"])


def feed(x, p):
    return x + jax.nn.gelu(norm(x, p["scale"]) @ p["up"]) @ p["down"]


def translate(params, batch):
    """An encoder and a decoder with a loop of three iterations each, which share their table with the head."""
    x, y = (params["table"][batch[side]] for side in ("source", "target"))
    x = jax.lax.scan(lambda h, p: (feed(attend(h, h, p), p), None), x, params["encoder"])[0]

    def turn(h, p):
        return feed(attend(attend(h, h, p), x, p["cross"]), p), None

    y = jax.lax.scan(turn, y, params["decoder"], reverse=True)[0]
    logits = norm(y, params["scale"]) @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1))


def classify(params, batch):
    """Convolutions of growing width with a residual branch, followed by products of other shapes."""
    x = batch["images"]
    for w in params["conv"]:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
        x = x + jnp.tanh(x)
    x = x.reshape(x.shape[0], -1)
    for w in params["fc"]:
        x = jax.nn.relu(x @ w)
    return jnp.mean((x - batch["labels"]) ** 2)


def captions(params, batch):
    """A vision tower before a language model of another width. Patches and text go through one loop each."""
    b, side = batch["images"].shape[:2]
    x = batch["images"].reshape(b, side, -1) @ params["patch"]
    x = jax.lax.scan(lambda h, p: (feed(attend(h, h, p), p), None), x, params["tower"])[0]
    x = jnp.concatenate([x @ params["join"], params["table"][batch["text"]]], axis=1)
    x = jax.lax.scan(lambda h, p: (feed(attend(h, h, p), p), None), x, params["language"])[0][:, side:]
    logits = norm(x, params["scale"]) @ params["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1))


def convolved(x, w, stride=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)


def group_norm(x):
    y = x.reshape(*x.shape[:3], 2, -1)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-3)
    return y.reshape(x.shape)


def wide_resnet(params, batch):
    """Residual blocks that become wider as they become coarser (Zagoruyko & Komodakis 2016), normed per example."""
    x = convolved(batch["images"], params["stem"])
    for p in params["blocks"]:
        stride = 1 if p["first"].shape[2] == p["first"].shape[3] else 2
        y = jax.nn.relu(group_norm(x))
        skip = x if stride == 1 else convolved(y, p["skip"], stride)
        y = convolved(y, p["first"], stride)
        x = skip + convolved(jax.nn.relu(group_norm(y)), p["second"])
    return jnp.mean((jnp.mean(jax.nn.relu(group_norm(x)), (1, 2)) @ params["head"] - batch["labels"]) ** 2)


def in_chunks(x, table, labels):
    """The loss over the sequence in chunks, in a loop that is not over layers."""

    def chunk(total, ends):
        logits, labels = ends[0] @ table.T, ends[1]
        return total - jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)), None

    ends = jnp.swapaxes(x, 0, 1), labels.T
    return jax.lax.scan(chunk, 0.0, ends)[0] / labels.size


def chunked(params, batch):
    """A loop over three layers, then a loop with a higher trip count over the loss."""
    x = jax.lax.scan(
        lambda h, p: (feed(attend(h, h, p), p), None), params["table"][batch["source"]], params["layers"]
    )
    return in_chunks(x[0], params["table"], batch["labels"])


def chunked_written(params, batch):
    """Layers written out, each recomputed by jax.checkpoint, then the loop over the loss."""
    x = params["table"][batch["source"]]
    for p in params["layers"]:
        x = jax.checkpoint(lambda h, p: feed(attend(h, h, p), p))(x, p)
    return in_chunks(x, params["table"], batch["labels"])


def arguments(model):
    rng = np.random.default_rng(0)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3)

    def attention():
        return {name: leaf(3, D, D) for name in "qkv"}

    def stack():
        return attention() | {"up": leaf(3, D, 4 * D), "down": leaf(3, 4 * D, D), "scale": leaf(3, D)}

    if model is captions:
        wide = 2 * D
        language = {name: leaf(3, wide, wide) for name in "qkv"}
        language |= {"up": leaf(3, wide, 4 * wide), "down": leaf(3, 4 * wide, wide), "scale": leaf(3, wide)}
        params = {"patch": leaf(12, D), "tower": stack(), "join": leaf(D, wide), "language": language}
        params |= {"table": leaf(VOCAB, wide), "scale": leaf(wide)}
        ids = {k: jnp.asarray(rng.integers(VOCAB, size=(BATCH, SEQ))) for k in ("text", "labels")}
        return params, {"images": leaf(BATCH, 4, 4, 3), **ids}
    if model is wide_resnet:
        widths = (4, 4, 8, 16)
        blocks = [
            {"first": leaf(3, 3, a, b), "second": leaf(3, 3, b, b)}
            | ({"skip": leaf(1, 1, a, b)} if a != b else {})
            for a, b in itertools.pairwise(widths)
        ]
        params = {"stem": leaf(3, 3, 3, 4), "blocks": blocks, "head": leaf(16, 8)}
        return params, {"images": leaf(BATCH, 8, 8, 3), "labels": leaf(BATCH, 8)}
    if model is translate:
        params = {"table": leaf(VOCAB, D), "scale": leaf(D)}
        params |= {"encoder": stack(), "decoder": stack() | {"cross": attention()}}
        ids = {k: jnp.asarray(rng.integers(VOCAB, size=(BATCH, SEQ))) for k in ("source", "target", "labels")}
        return params, ids
    if model in (chunked, chunked_written):
        ids = {k: jnp.asarray(rng.integers(VOCAB, size=(BATCH, SEQ))) for k in ("source", "labels")}
        layers = stack()
        if model is chunked_written:
            layers = [jax.tree.map(lambda w: w[i], layers) for i in range(3)]  # noqa: B023 - called at once
        return {"table": leaf(VOCAB, D), "layers": layers}, ids
    widths = (4, 8, 16, 8)
    convs = [leaf(3, 3, a, b) for a, b in itertools.pairwise(widths)]
    params = {"conv": convs, "fc": [leaf(8 * 16, 32), leaf(32, 8)]}
    return params, {"images": leaf(BATCH, 4, 4, 4), "labels": leaf(BATCH, 8)}


@cache
def planned(model, ranks=2, **more):
    with jax.enable_x64(True):
        return pase.compile(
            model,
            *arguments(model),
            devices=8,
            machine="h100x8",
            pipeline=ranks,
            baselines=False,
            mesh="2x2" if ranks == 2 else "2",
            accumulate=MICRO,
            memory_limit="none",
            remat="none",
            **more,
        )


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("model", "ranks"),
    [(classify, 4), (translate, 2), (chunked, 2), (captions, 2), (wide_resnet, 4), (chunked_written, 2)],
)
def test_stages_of_unequal_units_equal_the_unsharded_step(model, ranks):
    plan = planned(model, ranks)
    assert plan.pipeline.cut_points and "units a stage" in str(plan) and plan.bound <= plan.cost
    params, batch = arguments(model)
    whole = unsharded_step(model, OPTIMIZER, params, batch)
    jp = plan.jax
    placed, there = jp.device_put(params, batch)
    loss, grads = jp.value_and_grad()(placed, there)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    updated, _, loss = jp.train_step(OPTIMIZER)(placed, jp.init(OPTIMIZER, placed), there)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12


def drawn(rng, name, p, v, m, units, limit):
    """Return a problem with two ways to run every range of units, with random times."""
    s = schedule(name, p, m, v)
    each, n = rng.uniform(0.5, 2, (3, units)), s.stages
    ways = []
    for _ in range(n):
        of = []
        for a, b in itertools.combinations(range(units + 1), 2):
            for speed, room in ((1.0, 1.0), (1.3, 0.6)):
                f, i, w = speed * each[:, a:b].sum(axis=1)
                times = {"forward": f, "input": i, "weight": w, "recompute": 0.0}
                held, kept = room * (b - a), room * 0.5 * (b - a)
                after, buffers = float(rng.uniform(0, 0.5)), room * float(rng.uniform(0, 1))
                of.append(
                    RangeWay(
                        first=a,
                        end=b,
                        runs=runs_of(**times),
                        after=after,
                        held=held,
                        kept=kept,
                        waiting=kept / 2,
                        buffers=buffers,
                        send=(0.1 * (b < units), 0.05 * (b < units)),
                    )
                )
        ways.append(of)

    def exact(choice):
        mine = [ways[k][i] for k, i in enumerate(choice)]
        runs = np.array([w.runs for w in mine])
        after = np.bincount(s.rank_of, [w.after for w in mine], p)
        return StageTimes.of(
            runs[:, 0],
            runs[:, 2],
            runs[:, 3],
            ranks=p,
            send=np.reshape([w.send for w in mine[:-1]], (-1, 2)).T,
            after=after,
        )

    return RangeProblem(schedule=s, units=units, ways=ways, exact=exact, limits=np.full(p, limit))


def every_choice(problem):
    at = [{} for _ in problem.ways]
    for k, of in enumerate(problem.ways):
        for i, w in enumerate(of):
            at[k].setdefault((w.first, w.end), []).append(i)
    for cut in itertools.combinations(range(1, problem.units), len(at) - 1):
        ends = [0, *cut, problem.units]
        yield from itertools.product(*(at[k][ends[k], ends[k + 1]] for k in range(len(at))))


def fits(problem, choice):
    s, mine = problem.schedule, [problem.ways[k][i] for k, i in enumerate(choice)]
    rank = np.array(s.rank_of)
    held = np.bincount(rank, [w.held for w in mine], s.ranks)
    largest = [max(w.buffers for w, r in zip(mine, rank, strict=True) if r == at) for at in range(s.ranks)]
    active = peak_bytes(s, np.array([w.kept for w in mine]), np.array([w.waiting for w in mine]))
    return bool((held + active + largest <= problem.limits * (1 + 1e-9)).all())


@pytest.mark.parametrize(
    ("name", "p", "v"), [("1f1b", 3, 1), ("zb-h1", 3, 1), ("interleaved", 2, 2), ("zb-v", 2, 2)]
)
@pytest.mark.parametrize("limit", [np.inf, 9.0])
def test_ranges_of_units_equal_enumeration(name, p, v, limit):
    rng = np.random.default_rng(len(name))
    problem = drawn(rng, name, p, v, 4, 6, limit)
    steps = [
        simulate(problem.schedule, problem.exact(c)).step_s for c in every_choice(problem) if fits(problem, c)
    ]
    if not steps:
        with pytest.raises(Infeasible):
            best_ranges(problem)
        return
    found = best_ranges(problem)
    assert found.simulated.step_s == pytest.approx(min(steps), rel=1e-6) and fits(problem, found.choice)
    assert found.bound == pytest.approx(min(steps), rel=1e-5)
    assert best_ranges(problem, below=min(steps) * 0.999).choice is None


@cache
def tables_of(model, weights="hoisted"):
    traced, _ = traced_model(model, None, (), CompileOptions(devices=8))
    variant, blocks = Variant(accumulate=4), blocks_of(traced)
    problem = SplitProblem.of(traced.graph, 8, "h100x8", "analytic", "adam", "parameters")
    graph = graph_of(traced, variant)
    places, mesh = divided(graph, blocks), Mesh(names=("x", "y"), sizes=(2, 2))
    slow = problem.pricing.occupied or 1.0
    return StageTables(
        graph, places, variant, StageDevices(mesh=mesh, model=problem.model, slow=slow), "adam", weights
    )


TRANSFORMER = "zoo:transformer?batch=32&layers=3&seq=64&vocab=2048&remat=0"


@pytest.mark.some(2)
@pytest.mark.parametrize("model", [TRANSFORMER, "zoo:alexnet?batch=32"])
@pytest.mark.parametrize("weights", ["hoisted", "each"])
def test_a_range_of_units_is_priced_as_the_model_is(model, weights):
    """The parts of each range add up to the price of its tables, and all units to that of the model's tables."""
    t = tables_of(model, weights)
    assert isinstance(t.places, UnitPlaces)
    n = t.places.blocks
    for units in ((0, n), (0, n // 2), (n // 2, n), (n // 2, n // 2 + 1)):
        role = StageRole(units=units)
        split = t.cheapest(role, 0.0)
        m = 4 * sum(split.fixed(*what) for what in RUN.values())
        once = split.fixed(CostKind.AFTER) + t.slow * split.fixed(CostKind.BEFORE, CostKind.SUMS)
        assert m + once == pytest.approx(t.solved(role, 0.0, t.step).bound)
    whole = t.features.weighted(t.step, [1.0] * len(t.graph.nodes))
    assert cost_of(whole, t.solved(StageRole(units=(0, n)), 0.0, t.step).choice) == pytest.approx(
        t.least(StageRole(units=(0, n)), 0.0, t.step)
    )
    assert t.least_apart(t.step) <= t.least(StageRole(units=(0, n)), 0.0, t.step) * (1 + 1e-9)


def test_both_stacks_are_cut_and_a_single_one_is_cut_as_before():
    t = tables_of(TRANSFORMER)
    chain = t.places.chain
    assert sorted(b - a for a, b in chain.loops.values()) == [3, 3] and chain.units == 9
    crossing = [len(c) for c in chain.crossing]
    assert crossing[:4] == [1] * 4 and crossing[4:] == [2, 2, 2, 1], crossing
    assert "table" in t.places.shared((0, 4)) and not t.places.shared((0, 9))
    one = tables_of("zoo:gpt2?layers=4&batch=16&seq=64&vocab=2048&remat=0")
    assert type(one.places) is Places and one.places.blocks == 4


def test_the_bound_holds_for_every_division_and_schedule():
    t = tables_of("zoo:alexnet?batch=32")
    menu = ChainMenu([t], 2, 4, np.inf)
    found = [menu.staged(d, v)[0] for d, v in menu.schedules()]
    best = min(f.step_s for f in found)
    least, _ = menu.bounded(best)
    assert menu.least_s() <= least <= best
    for f in found:
        if f.schedule.stages > 2:
            continue
        n = t.places.blocks
        steps = []
        for cut in range(1, n):
            pair = [menu.splits(StageRole(units=u)) for u in ((0, cut), (cut, n))]
            for splits in itertools.product(*pair):
                counts = np.array([cut, n - cut])
                steps.append(simulate(f.schedule, menu.problem(f.schedule, splits).times(counts)).step_s)
        assert f.step_s == pytest.approx(min(steps), rel=1e-3) and f.cuts.bound <= min(steps) * (1 + 1e-6)


def test_a_model_that_is_one_product_is_refused():
    with pytest.raises(Infeasible, match="cannot be cut into stages"):
        pase.compile(
            lambda w, x: jnp.sum(x @ w), jnp.ones((512, 8)), jnp.ones((16, 512)), devices=4, pipeline=2
        )
