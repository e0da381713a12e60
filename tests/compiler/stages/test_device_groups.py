"""Stages and replicas on groups of unequal devices, compared with enumeration."""

from __future__ import annotations

import itertools
import json
from functools import cache

import numpy as np
import pytest

import pase
from pase.backends.registry import emit
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant
from pase.compiler.resolve import traced_model
from pase.compiler.stages.candidates import TablesMade, menu_of
from pase.compiler.stages.device_groups import arrangements, groups_of
from pase.compiler.stages.replica_split import best_split, equal_split, search_replica_split
from pase.errors import PaseError
from pase.files.codec import to_tree
from pase.frontends.jax.blocks import blocks_of
from pase.machine import LinkLevel, Machine, Mesh, load
from pase.machine.groups import grouped
from pase.machine.scale import scaled
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.plan.layout import from_json, to_json
from pase.plan.pipeline import lines
from pase.questions.report_pipeline import stages_table

MODEL = "zoo:gpt2?layers=6&batch=16&seq=128&vocab=2048&remat=0"

WIDE = "zoo:gpt2?layers=2&batch=64&seq=512&vocab=2048&remat=0"


@cache
def machine(speed: float = 0.4, link: float = 12.5e9, counts: tuple[int, int] = (2, 2)) -> Machine:
    """Return a machine of H100s, and of devices at a fraction of their speed, joined by a link."""
    fast = load("h100x8")
    slow = scaled(fast, {"flops": speed, "memory": speed})
    between = LinkLevel(name="net", latency_s=2e-5, bandwidth_bytes_per_s=link)
    return grouped("mixed", list(zip((fast, slow), counts, strict=True)), between, {})


def setup(m: Machine, devices: int, **options):  # type: ignore[no-untyped-def]
    asked = CompileOptions(devices=devices, machine=m, memory_limit="none", remat="none", **options)
    traced, _ = traced_model(MODEL, None, (), asked)
    problem = SplitProblem.of(traced.graph, devices, m, "analytic", "adam", asked.overlap)
    return problem, traced, asked


def test_stages_on_groups_equal_enumeration():
    """No order of the groups, schedule, cut or split on the menu is cheaper."""
    m = machine()
    problem, traced, options = setup(m, 4)
    groups, made = (
        groups_of(problem, options),
        TablesMade(traced, blocks_of(traced), "adam", keep=True, spent=Spent()),
    )
    mesh, best = Mesh(names=("x",), sizes=(2,)), np.inf
    places = list(arrangements(problem, groups, 2))
    assert [p.numbers for p in places] == [(0, 1), (1, 0)]
    for place in places:
        menu = menu_of(made.all([Variant(accumulate=4)], mesh, place.groups), 4, place)
        least, cheapest = menu.least_s(), np.inf
        for d, chunks in menu.schedules():
            s = schedule(d.name, 2, 4, chunks)
            chosen = menu.chosen(s)
            assert chosen is not None
            found = menu.problem(s, chosen.splits)
            for cut in itertools.combinations(range(1, 6), s.stages - 1):
                step = simulate(s, found.times(np.diff([0, *cut, 6]))).step_s
                cheapest = min(cheapest, step)
        assert least <= menu.bounded(np.inf)[0] * (1 + 1e-9) <= cheapest * (1 + 1e-6)
        best = min(best, cheapest)
    plan = pase.compile(
        MODEL, devices=4, machine=m, pipeline=2, mesh="2", accumulate=4, remat="none", memory_limit="none"
    )
    assert plan.cost == pytest.approx(best, rel=1e-3) and plan.cost >= best * (1 - 1e-9)
    p = plan.pipeline
    assert p is not None and sorted(p.groups) == sorted(g.name for g in m.groups)
    # The slow group has fewer blocks, and the plan says that equal numbers take longer.
    blocks = np.bincount([s.rank for s in p.stages], p.cuts)
    slow = p.groups.index(m.groups[1].name)
    assert blocks[slow] < blocks[1 - slow] and p.equal_s is not None and p.equal_s > plan.cost
    assert any("would take" in line and "longer" in line for line in lines(plan))
    assert from_json(json.loads(json.dumps(to_tree(to_json(plan))))).pipeline == p


def test_shares_equal_enumeration():
    """This holds for any times that grow with the number of micro-batches, and at least one micro-batch each."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        groups = int(rng.integers(2, 5))
        total = int(rng.integers(groups, 14))
        times = np.cumsum(rng.choice([0.0, 0.5, 1.0, 3.0], (groups, total + 1)), axis=1)
        start = equal_split(total, rng.integers(1, 9, groups).tolist())
        assert sum(start) == total and min(start) >= 1
        found = best_split(total, groups, lambda g, k, t=times: float(t[g, k]), start)
        assert sum(found) == total and min(found) >= 1
        every = (
            max(times[g, k] for g, k in enumerate(shares))
            for shares in itertools.product(range(1, total + 1), repeat=groups)
            if sum(shares) == total
        )
        assert max(times[g, k] for g, k in enumerate(found)) == min(every)


def test_replicas_take_shares_by_speed():
    m = machine()
    problem, traced, options = setup(m, 4, pipeline="auto", accumulate=8)
    (shares,) = search_replica_split(problem, traced, options, lambda _: None, Spent()).found
    fast, slow = (r.micro_batches for r in shares.replicas)
    assert fast + slow == 8 and fast > slow
    assert shares.bound <= shares.step_s < shares.equal_s
    # A replica's step takes no less time with more micro-batches, on which the proof depends.
    from pase.compiler.stages.replica_split import _OnOneGroup

    made = TablesMade(traced, blocks_of(traced), "adam", keep=True, spent=Spent())
    group = [
        _OnOneGroup(site, problem, options, made, [Variant(accumulate=8)])
        for site in groups_of(problem, options)
    ]
    times = np.array([[g.step_s(k) for k in range(1, 8)] for g in group])
    assert (np.diff(times) > 0).all()
    every = [max(times[0, k - 1], times[1, 7 - k]) + shares.sum_s for k in range(1, 8)]
    assert shares.step_s == pytest.approx(min(every), rel=1e-9)
    assert shares.equal_s == pytest.approx(every[3], rel=1e-9)


def test_where_equal_shares_are_as_good_it_says_so():
    """Two equal halves, joined by a separate link."""
    half = machine(speed=1.0, link=50e9)
    problem, traced, options = setup(half, 4, pipeline="auto", accumulate=4)
    (shares,) = search_replica_split(problem, traced, options, lambda _: None, Spent()).found
    assert [r.micro_batches for r in shares.replicas] == [2, 2] and shares.equal_s == shares.step_s
    plan = pase.compile(
        WIDE,
        devices=4,
        machine=half,
        pipeline="auto",
        baselines=False,
        max_axes=1,
        remat="none",
        accumulate=4,
    )
    assert plan.pipeline is not None and plan.pipeline.cuts == (1, 1)
    assert any("equal  numbers of blocks are as good" in line for line in lines(plan))
    page, names = stages_table(plan), {plan.pipeline.rank_name(r) for r in range(2)}
    assert "numbers of blocks are as good" in page and all(n.removeprefix("rank ") in page for n in names)
    assert len(names) == 2 and all("(" in n for n in names) and set(plan.timeline.hosts) == {0, 1}
    assert plan.baselines["replicas on the groups"] >= plan.cost >= plan.bound


def test_a_plan_of_replicas_is_priced_saved_and_given_to_jax(tmp_path):
    plan = pase.compile(
        WIDE,
        devices=4,
        machine=machine(speed=0.3, link=50e9),
        pipeline="auto",
        baselines=False,
        max_axes=1,
        remat="none",
        accumulate=4,
    )
    p = plan.pipeline
    assert p is not None and [r.micro_batches for r in p.replicas] == [3, 1]
    assert max(r.step_s for r in p.replicas) + (p.sum_s or 0.0) == pytest.approx(plan.cost)
    assert plan.bound <= plan.cost < plan.baselines["stages on the groups"] < plan.baselines["no stages"]
    assert any("share  h100x8#0: 3 micro-batches" in line for line in lines(plan))
    assert any("shares of the micro-batches would take" in line for line in lines(plan))
    assert plan.jax.replica_split == (3, 1) and "runs the replicas in JAX" in str(plan)
    assert [r.splits[0].accumulate for r in plan.jax.replicas] == [3, 1]
    tree = to_tree(to_json(plan))
    assert from_json(json.loads(json.dumps(tree))).pipeline == p
    tree["pipeline"]["replicas"][0]["pipeline"]["groups"] = ["one"] * 9
    with pytest.raises(PaseError, match="9 groups") as e:
        from_json(tree)
    assert e.value.where == "layout: at pipeline/replicas/0/pipeline/groups"
    with pytest.raises(PaseError, match="replica on each of 2 groups"):
        emit(plan, "torch-schedule", tmp_path / "schedule.csv")
    with pytest.raises(PaseError, match="PyTorch"):
        _ = plan.torch


def test_all_devices_are_asked_for():
    with pytest.raises(PaseError, match=r"2 h100x8#0 \+ 2 h100x8#1.*, not 8") as e:
        pase.compile(MODEL, devices=8, machine=machine(speed=1.0, link=0.3e9), pipeline=2)
    assert e.value.where == "machine 'mixed'" and "devices=4" in e.value.fix
