"""Replicas on groups of unequal devices: their shares of the micro-batches, against enumeration."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import pase
from pase.backends.registry import emit
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant
from pase.compiler.stages.candidates import TablesMade
from pase.compiler.stages.device_groups import groups_of
from pase.compiler.stages.replica_split import best_split, equal_split, search_replica_split
from pase.errors import PaseError
from pase.files.codec import to_tree
from pase.frontends.jax.blocks import blocks_of
from pase.plan.layout import from_json, to_json
from pase.plan.pipeline import lines
from pase.questions.report_pipeline import stages_table
from tests.compiler.stages.groups import machine, setup

WIDE = "zoo:gpt2?layers=2&batch=64&seq=512&vocab=2048&remat=0"


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
    half = machine(speed=1.0, link=10e9)
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
