"""The search over ranges of unequal units against every division and every way, each simulated."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.chain_places import UnitPlaces, divided
from pase.compiler.chain_search import ChainMenu
from pase.compiler.problem import SplitProblem
from pase.compiler.stage_menu import StageRole, StageTables
from pase.compiler.stage_search import GAP
from pase.compiler.variants import Variant, graph_of
from pase.errors import PaseError
from pase.frontends.from_jax import trace
from pase.frontends.jax_blocks import blocks_of
from pase.machine import Mesh
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import simulate

MICRO = 4


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pair(b, d):
    return {"x": leaf(b, d), "y": leaf(b, d)}


def skip():
    """A weight that both ends read, and an activation that is added far from where it is made."""

    def loss(params, batch):
        h = s = jnp.tanh(batch["x"] @ params["w"])
        for w in params["o"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((jnp.tanh((h + s) @ params["w"].T) @ params["z"] - batch["y"]) ** 2)

    d = 512
    middle = [leaf(2 * d, 4 * d), leaf(4 * d, d), leaf(d, 2 * d)]
    return loss, ({"w": leaf(d, 2 * d), "o": middle, "z": leaf(d, d)}, pair(64, d))


def two_stacks():
    """Loops over layers of two widths."""

    def turn(h, p):
        return h + jnp.tanh(jnp.tanh(h @ p["a"]) @ p["b"]), None

    def loss(params, batch):
        x = jax.lax.scan(turn, batch["x"], params["s"])[0]
        x = jax.lax.scan(turn, jnp.tanh(x @ params["m"]), params["t"])[0]
        return jnp.mean((x @ params["o"] - batch["y"]) ** 2)

    d = 256
    s, t = ({"a": leaf(2, w, 4 * w), "b": leaf(2, 4 * w, w)} for w in (d, d // 2))
    return loss, ({"s": s, "m": leaf(d, d // 2), "t": t, "o": leaf(d // 2, d)}, pair(16, d))


def products(b=4096, d=512):
    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    widths = (d, 2 * d, 4 * d, d, d, d)
    return loss, ([leaf(*w) for w in itertools.pairwise(widths)], pair(b, d))


def tables(model):
    loss, args = model
    traced, variant = trace(loss, *args), Variant(accumulate=MICRO)
    problem = SplitProblem.of(traced.graph, 8, "h100x8", "analytic", "adam", "parameters")
    graph, mesh = graph_of(traced, variant), Mesh(names=("x", "y"), sizes=(2, 2))
    places, slow = divided(graph, blocks_of(traced)), problem.pricing.beside or 1.0
    assert isinstance(places, UnitPlaces)
    return StageTables(graph, places, variant, mesh, problem.model, "adam", "once", slow=slow)


def shortest_of_all(menu, s, ways):
    """The step of the best pipeline that fits: every division, and for each range every one of its ``ways``."""
    best, n = np.inf, menu.places.blocks
    for cut in itertools.combinations(range(1, n), s.stages - 1):
        ends = itertools.pairwise([0, *cut, n])
        roles = [StageRole(units=u, site=menu.sites[s.rank_of[k]]) for k, u in enumerate(ends)]
        for splits in itertools.product(*map(ways, roles)):
            if menu._fits(s, splits):
                best = min(best, simulate(s, menu._exact(s, splits)).step_s)
    return best


@pytest.mark.parametrize("model", [skip, two_stacks])
def test_no_schedule_has_a_better_division_than_the_one_found(model):
    """For some, the division of equal work is the best: it is kept though nothing beats it."""
    menu, every = ChainMenu([tables(model())], 2, MICRO, np.inf), []
    for d, v in menu.schedules():
        s = schedule(d.name, 2, MICRO, v)
        every.append(shortest_of_all(menu, s, menu.splits))
        found, fits = menu.staged(d, v)
        assert fits and found.step_s <= every[-1] * (1 + GAP), (d.name, v)
        assert found.cuts.bound <= every[-1] * (1 + 1e-6)
        assert menu.staged(d, v, every[-1] * 0.999) == (None, True)
    assert max(menu.least_s(), menu.bounded(min(every) * 10)[0]) <= min(every)


def test_under_a_limit_fast_and_sparing_ways_are_mixed():
    """A fast way for one stage and a sparing one for the other may be the best that fits."""
    t, s = tables(products()), schedule("1f1b", 2, MICRO, 1)
    first = ChainMenu([t], 2, MICRO, np.inf).staged(SCHEDULES["1f1b"], 1)[0]
    rows, room = ChainMenu([t], 2, MICRO, 1e15).problem(s, first.splits).memory_rows
    needed = float((rows @ np.array(first.cuts.counts) + 1e15 - room).max())
    steps = []
    for part in (0.3, 0.7, 0.95, 1.01):
        menu = ChainMenu([t], 2, MICRO, part * needed)
        best = shortest_of_all(menu, s, menu._sparing)
        found, fits = menu.staged(SCHEDULES["1f1b"], 1)
        assert fits == np.isfinite(best)
        if fits:
            assert found.step_s <= best * (1 + GAP) and found.cuts.bound <= best * (1 + 1e-6)
        steps.append(best)
    assert steps == sorted(steps, reverse=True) and len(set(steps)) > 2


def test_a_limit_of_nothing_is_refused():
    loss, args = products(64, 64)
    with pytest.raises(PaseError, match="memory limit 0: expected a size"):
        pase.compile(loss, *args, devices=4, machine="h100x8", pipeline=2, mesh="2", memory_limit=0)
