"""The search over ranges of unequal units, compared with a simulation of every division and every way."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.stages.candidates import TablesMade, menu_of
from pase.compiler.stages.chain_places import UnitPlaces, divided
from pase.compiler.stages.chain_search import ChainMenu
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.device_groups import arrangements, groups_of
from pase.compiler.stages.menu import RUN, StageDevices, StageRole, StageTables
from pase.compiler.stages.search import GAP
from pase.errors import PaseError
from pase.frontends.jax.blocks import blocks_of
from pase.frontends.jax.frontend import trace
from pase.machine import LinkLevel, Mesh, load
from pase.machine.groups import grouped
from pase.machine.scale import scaled
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import simulate

MICRO = 4


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pair(b, d):
    return {"x": leaf(b, d), "y": leaf(b, d)}


def skip():
    """A model with a weight that both ends read, and an activation that is added far from where it is made."""

    def loss(params, batch):
        h = s = jnp.tanh(batch["x"] @ params["w"])
        for w in params["o"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((jnp.tanh((h + s) @ params["w"].T) @ params["z"] - batch["y"]) ** 2)

    d = 512
    middle = [leaf(2 * d, 4 * d), leaf(4 * d, d), leaf(d, 2 * d)]
    return loss, ({"w": leaf(d, 2 * d), "o": middle, "z": leaf(d, d)}, pair(64, d))


def two_stacks():
    """A model with two loops over layers, of different widths."""

    def turn(h, p):
        return h + jnp.tanh(jnp.tanh(h @ p["a"]) @ p["b"]), None

    def loss(params, batch):
        x = jax.lax.scan(turn, batch["x"], params["s"])[0]
        x = jax.lax.scan(turn, jnp.tanh(x @ params["m"]), params["t"])[0]
        return jnp.mean((x @ params["o"] - batch["y"]) ** 2)

    d = 256
    s, t = ({"a": leaf(2, w, 4 * w), "b": leaf(2, 4 * w, w)} for w in (d, d // 2))
    return loss, ({"s": s, "m": leaf(d, d // 2), "t": t, "o": leaf(d // 2, d)}, pair(16, d))


def stack_read_twice():
    """A model with two loops over the layers of one stack."""

    def turn(h, p):
        return jnp.tanh(h @ p["a"]) @ p["b"] + h, None

    def loss(params, batch):
        x = jax.lax.scan(turn, batch["x"], params["s"])[0]
        x = jax.lax.scan(turn, jnp.sin(x), params["s"])[0]
        return jnp.mean((jnp.tanh(x @ params["o"]) - batch["y"]) ** 2)

    d = 1024
    return loss, ({"s": {"a": leaf(2, d, d), "b": leaf(2, d, d)}, "o": leaf(d, d)}, pair(16, d))


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
    problem = SplitProblem.of(traced.graph, 8, "a100x8", "analytic", "adam", "parameters")
    graph, mesh = graph_of(traced, variant), Mesh(names=("x", "y"), sizes=(2, 2))
    places, slow = divided(graph, blocks_of(traced)), problem.pricing.occupied or 1.0
    assert isinstance(places, UnitPlaces)
    return StageTables(
        graph, places, variant, StageDevices(mesh=mesh, model=problem.model, slow=slow), "adam", "hoisted"
    )


def shortest_of_all(menu, s, ways):
    """Return the step of the best pipeline that fits, over all divisions and all ``ways`` of each range."""
    best, n = np.inf, menu.places.blocks
    for cut in itertools.combinations(range(1, n), s.stages - 1):
        ends = itertools.pairwise([0, *cut, n])
        roles = [StageRole(units=u, group=menu.groups[s.rank_of[k]]) for k, u in enumerate(ends)]
        for splits in itertools.product(*map(ways, roles)):
            if menu._fits(s, splits):
                best = min(best, simulate(s, menu._exact(s, splits)).step_s)
    return best


@pytest.mark.some(1)
@pytest.mark.parametrize("model", [skip, two_stacks, stack_read_twice])
def test_no_schedule_has_a_better_division_than_the_one_found(model):
    """For some models the division of equal work is the best. It must be found although nothing beats it."""
    menu, every = ChainMenu([tables(model())], 2, MICRO, np.inf), []
    for d, v in menu.schedules():
        s = schedule(d.name, 2, MICRO, v)
        every.append(shortest_of_all(menu, s, menu.splits))
        found, fits = menu.staged(d, v)
        assert fits and found.step_s <= every[-1] * (1 + GAP), (d.name, v)
        assert found.cuts.bound <= every[-1] * (1 + 1e-6)
        assert menu.staged(d, v, every[-1] * 0.999) == (None, True)
    assert max(menu.least_s(), menu.bounded(min(every) * 10)[0]) <= min(every)


def test_a_stack_that_two_loops_read_is_there_once_in_a_stage_and_whole():
    t = tables(stack_read_twice())
    n = t.places.blocks
    for units in itertools.combinations(range(n + 1), 2):
        split, role = t.cheapest(StageRole(units=units), 0.0), StageRole(units=units)
        got = MICRO * sum(split.fixed(*what) for what in RUN.values()) + split.fixed(CostKind.AFTER)
        got += t.slow * split.fixed(CostKind.BEFORE, CostKind.SUMS)
        assert got == pytest.approx(t.solved(role, 0.0, t.step).bound)
    menu = ChainMenu([t], 2, MICRO, np.inf)
    parts = [menu.splits(StageRole(units=u))[0] for u in ((0, 1), (1, n), (0, n))]
    one, both = (w.parts["per step"].memory["parameters"] for w in parts[::2])
    assert 0 < one <= both  # as in the backend, each stage with an iteration has all rows
    assert (menu.tied_after(schedule("1f1b", 2, MICRO, 1), parts[:2]) > 0).all()


def test_activations_without_gradients_cross_too():
    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params[0])
        mask = jax.lax.stop_gradient(jnp.sign(h))
        for w in params[1:]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h * mask - batch["y"]) ** 2)

    d = 256
    t = tables(
        (loss, ([leaf(d, 2 * d), leaf(2 * d, d), leaf(d, 2 * d)], {"x": leaf(64, d), "y": leaf(64, 2 * d)}))
    )
    crossing = t.places.chain.crossing
    masks = [[not t.graph.tensors[tensor].needs_grad for _, tensor in of] for of in crossing]
    assert all(any(of) for of in masks[1:]), crossing


def test_the_least_time_holds_for_units_that_suit_different_devices():
    """No rank has to do what the other does better.

    Products with small weights suit devices with ten times the FLOP/s, and products with large weights suit those with
    ten times the bytes per second.
    """
    a, b = (scaled(load("h100x8"), {"flops": f, "memory": m}) for f, m in ((10, 1), (1, 10)))
    link = LinkLevel(name="net", latency_s=1e-6, bandwidth_bytes_per_s=1e12)
    machine = grouped("mixed", [(a, 2), (b, 2)], link, {})

    def loss(params, batch):
        x = batch["x"]
        for w in params["compute"]:
            x = jnp.einsum("bsd,de->bse", x, w)
        x = x.mean(1)
        for w in params["memory"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    k = 4096
    params = {"compute": [leaf(k, k)] * 2, "memory": [leaf(k, 4 * k), leaf(4 * k, 4 * k), leaf(4 * k, k)]}
    traced = trace(loss, params, {"x": leaf(8, 512, k)})
    asked = CompileOptions(
        devices=4, machine=machine, memory_limit="none", remat="none", pipeline=2, mesh="2", accumulate=MICRO
    )
    problem = SplitProblem.of(traced.graph, 4, machine, "analytic", "adam", asked.overlap)
    made = TablesMade(traced, blocks_of(traced), "adam", keep=True, spent=Spent())
    mesh = Mesh(names=("x",), sizes=(2,))
    for place in arrangements(problem, groups_of(problem, asked), 2):
        menu = menu_of(made.all([Variant(accumulate=MICRO)], mesh, place.groups), MICRO, place)
        found = [menu.staged(d, v)[0] for d, v in menu.schedules()]
        assert len(set(menu.groups)) == 2
        assert 0 < menu.least_s() <= min(f.step_s for f in found if f is not None)


def test_under_a_limit_fast_and_sparing_ways_are_mixed():
    """The best that fits may combine a fast way for one stage with one that needs less memory for the other."""
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
    with pytest.raises(PaseError, match="memory limit: 0 is not a size"):
        pase.compile(loss, *args, devices=4, machine="h100x8", pipeline=2, mesh="2", memory_limit=0)
