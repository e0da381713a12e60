"""Variants of a step under a memory limit, compared with enumeration and with what a user would write."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.meshes.baselines import memory_of
from pase.compiler.meshes.fit import _Answer, _LimitedSearch, _takes_less, fit_limit
from pase.compiler.meshes.plans import plan_of
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant, variants
from pase.compiler.resolve import resolve
from pase.errors import Infeasible, PaseError
from pase.frontends.common.micro_batches import examples_meet
from pase.frontends.jax.blocks import batch_inputs, blocks_of
from pase.frontends.jax.frontend import trace
from pase.machine import Mesh, mesh_from
from pase.search import Solution
from pase.tables.layouts import configs
from tests.compiler.meshes.models import MODEL, WIDE, S, wide


def norms(params, x):
    mean, var = x.mean(0), x.var(0)
    return jnp.mean((((x - mean) / jnp.sqrt(var + 1)) @ params["w"]) ** 2)


def weighted(params, x):
    seen = (x[:, 0] > 0).astype("float32")
    return jnp.sum((x @ params["w"]).sum(1) ** 2 * seen) / jnp.sum(seen)


@pytest.mark.some(1)
@pytest.mark.parametrize(("machine", "overlap"), [("h100x8", "parameters"), ("tpu_v5e", "none")])
def test_the_best_variant_that_fits_is_found(machine, overlap):
    """Of all strategies, micro-batches and hoisting choices, priced item by item, none that fits is cheaper.

    This holds for both memory accounts, and if gradients overlap with backward.
    """
    traced = trace(wide, *WIDE)
    problem, mesh = SplitProblem.of(traced.graph, 2, machine, "analytic", "adam"), mesh_from("2", 2)
    problem = replace(problem, overlap=overlap)
    priced = []
    ways = ("none", "gathers", "all")
    for k, once in [(1, "none"), *itertools.product((2, 4, 8), ways)]:
        p = problem.varied(traced, Variant(accumulate=k, hoisted=once))
        spaces = [configs(n, mesh) for n in p.graph.nodes]
        for rows in itertools.product(*spaces):
            chosen = {n.name: row for n, row in zip(p.graph.nodes, rows, strict=True)}
            plan = plan_of(p, chosen, mesh, "wide", traced)
            priced.append((plan.memory.total, plan.cost, k))
    assert len(priced) > 200
    free = min(cost for _, cost, _ in priced)
    largest = min(m for m, cost, _ in priced if cost <= free * (1 + 1e-9))
    always = problem.machine.device.workspace_bytes  # many times as large as this model
    seen = set()
    for limit in always + np.array([0.25, 0.5, 1.0]) * (largest - always):
        fitting = [row for row in priced if row[0] <= limit]
        if not fitting:
            continue
        plan = pase.compile(
            wide,
            *WIDE,
            devices=2,
            mesh="2",
            machine=machine,
            overlap=overlap,
            once="auto",
            memory_limit=float(limit),
            baselines=False,
        )
        seen.add((plan.accumulate, plan.once))
        assert plan.memory.total <= limit
        cheapest = min(cost for _, cost, _ in fitting)
        assert plan.bound <= cheapest * (1 + 1e-9)
        assert plan.cost == pytest.approx(cheapest, rel=1e-9)
    assert len({k for k, _ in seen}) > 1 and len({o for _, o in seen}) > 1


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("zoo:gpt2?scan=0&remat=0", 12),
        ("zoo:gpt2?scan=0", 0),
        ("zoo:gpt2?remat=0", 1),
        ("zoo:gpt2", 0),
        ("zoo:mlp", 0),
        ("zoo:resnet101", 20),
    ],
)
def test_blocks_are_found(model, count):
    """Layers in loops and unrolled layers are found; none if the user rematerializes them or nothing repeats."""
    found = blocks_of(resolve(model))
    assert len(found) >= count if count == 20 else len(found) == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))


def test_examples_that_meet_are_noticed():
    params = {"w": S((8, 8), "float32")}
    x = S((16, 8), "float32")

    def where(fn):
        return meet(trace(fn, params, x))

    def meet(traced):
        graph = SplitProblem.of(traced.graph, 2, None, "analytic", "adam").graph
        return examples_meet(graph, batch_inputs(traced), state_of_whole=False)

    assert "test_fit.py" in where(norms)
    assert where(weighted) is None
    assert where(lambda p, x: wide(p["w"], x)) is None
    for name, mixes in (("gpt2", False), ("resnet101", True), ("transformer", False), ("vit_l16", False)):
        assert bool(meet(resolve(f"zoo:{name}"))) is mixes
    with pytest.raises(PaseError, match=r"would give other numbers: .*test_fit.py"):
        pase.compile(norms, params, x, devices=2, accumulate=2)


def test_what_is_fixed_stays_fixed():
    plan = pase.compile(wide, *WIDE, devices=2, accumulate=4, baselines=False)
    assert (plan.accumulate, plan.remat) == (4, ())
    traced = resolve("zoo:gpt2?remat=0&layers=2")
    graph = SplitProblem.of(traced.graph, 2, None, "analytic", "adam").graph
    written = CompileOptions(devices=2, accumulate=2, remat="all", once="none")
    assert [v.blocks != () for (v,) in variants(traced, graph, written, False)] == [True]
    asked = CompileOptions(devices=2, remat="none", once="none")
    assert len(list(variants(traced, graph, asked, True))) == 8  # 1, 2, … 128 of a batch of 128
    for arguments, message in (
        ({"accumulate": 0}, "accumulate: .* got 0"),
        ({"accumulate": 3}, "batch of 4096 .* 3 micro-batches"),
        ({"remat": "some"}, "remat: .* got 'some'"),
        ({"remat": "all"}, "remat='all': .*no repeated block to recompute"),
        ({"remat": "attention"}, "no repeated block with an attention"),
    ):
        with pytest.raises(PaseError, match=message):
            pase.compile(wide, *WIDE, devices=2, **arguments)


@pytest.mark.parametrize("limit", [None, "machine"])
def test_what_is_sent_once_is_the_cheapest_where_memory_is_no_constraint(limit):
    """Adding whole unreduced gradients in each micro-batch takes longer here than reducing them each time."""
    o = {"devices": 8, "accumulate": 2, "baselines": False, "memory_limit": limit}
    model = "zoo:mlp?dtype=bfloat16&batch=4096"
    plans = {once: pase.compile(model, once=once, **o) for once in ("none", "gathers", "all", "auto")}
    assert plans["gathers"].cost < plans["all"].cost
    assert plans["auto"].cost == min(p.cost for p in plans.values())
    assert plans["auto"].once == "gathers"
    assert plans["auto"].optimal


def test_a_mesh_that_is_too_dear_without_the_limit_is_not_priced(monkeypatch):
    """The answer within the limit and its bound are the same as if every mesh were priced before any is searched."""
    weights = {name: S((512, 512), "float32") for name in "wv"}
    traced = trace(
        lambda p, x: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2), weights, S((4096, 512), "float32")
    )
    problem = SplitProblem.of(traced.graph, 16, "mi300x8", "analytic", "adam", "parameters")
    over = problem.meshes(None, 2)
    free = search_meshes(problem, over, close=False)
    limit = 0.5 * memory_of(problem, free.configs, free.mesh).total
    each = {m: fit_limit(problem, free, [m], limit, Spent(), lambda _: None) for m in over}
    least = min(found.solution.cost for found, _ in each.values() if found is not None)
    priced, price = list[Mesh](), _LimitedSearch.priced
    monkeypatch.setattr(
        _LimitedSearch, "priced", lambda self, worth: (priced.append(self.mesh), price(self, worth))[1]
    )
    found, bound = fit_limit(problem, free, over, limit, Spent(), lambda _: None)
    assert found is not None and found.solution.cost == pytest.approx(least, rel=1e-9)
    assert bound <= found.solution.cost and bound <= least * (1 + 1e-12)
    assert bound == pytest.approx(min(b for _, b in each.values()), rel=1e-6)
    dear = [m for m in over if free.bounds[m.sizes] >= found.solution.cost]
    assert dear and not set(dear) & set(priced)


def test_a_gap_is_not_closed_on_a_mesh_that_another_mesh_shows_to_be_too_dear(monkeypatch):
    """Closing one takes longer than all else. The mesh that looked best is not closed down to its own best answer."""
    problem = SplitProblem.of(trace(wide, *WIDE).graph, 4, "mi300x8", "analytic", "adam")
    first, second, *_ = over = problem.meshes(None, 2)[:2]
    free = search_meshes(problem, over)
    free = replace(free, bounds={first.sizes: 1.0, second.sizes: 2.0})
    gaps = {
        first: [(9.0, 5.0)],
        second: [(4.0, 2.0), (3.0, 3.0)],
    }  # (cost, bound) of the open and of the closed search
    closed = []

    def cheapest(self, below, price, close=True):
        closed.extend([self.mesh] if close else [])
        cost, bound = gaps[self.mesh].pop(0)
        return _Answer(solution=replace(free.solution, cost=cost), bound=bound, byte_price=0.0)

    monkeypatch.setattr(_LimitedSearch, "priced", lambda self, price: (free.bounds[self.mesh.sizes], 0.0))
    monkeypatch.setattr(_LimitedSearch, "cheapest", cheapest)
    found, bound = fit_limit(problem, free, over, 1.0, Spent(), lambda _: None)
    assert found is not None and (found.mesh, found.solution.cost, bound) == (second, 3.0, 3.0)
    assert closed == [second]


def test_a_variant_that_takes_less_is_noticed():
    """Meshes may then have been skipped wrongly, so nothing counts as proven."""
    free = SimpleNamespace(bounds={(2, 4): 1.0, (8,): 3.0})
    for cost, less in ((1.0, False), (0.9, True)):
        answer = Solution(choice=np.zeros(0, np.int64), cost=cost, bound=cost, optimal=True)
        found = SimpleNamespace(answers={(2, 4): answer, (4, 2): answer})
        assert _takes_less(found, free) == less


def test_what_cannot_fit_says_what_would():
    with pytest.raises(Infeasible, match=r"0\.0009766 GiB .* on 4 devices: .* [\d.]+ GiB") as e:
        pase.compile(MODEL, devices=4, memory_limit=2**20)
    assert "devices" in e.value.fix


def test_what_cannot_fit_says_how_near_it_comes():
    with pytest.raises(Infeasible, match=r"\(\d+ micro-batches, mesh 2\)") as e:
        pase.compile(wide, *WIDE, devices=2, machine="a100x8", memory_limit=64)
    assert "128 devices" in e.value.fix
    with pytest.raises(Infeasible, match=r"on 2 devices: .*; use (4|8|16) devices"):
        on = {"devices": 2, "machine": "a100x8"}
        least = pase.compile(wide, *WIDE, accumulate=4096, baselines=False, **on).memory
        pase.compile(wide, *WIDE, memory_limit=least.total / 4, **on)
