"""Stages on groups of unequal devices, compared with enumeration."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import pase
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import Variant
from pase.compiler.stages.candidates import TablesMade, menu_of
from pase.compiler.stages.device_groups import arrangements, groups_of, rank_meshes
from pase.errors import PaseError
from pase.files.codec import to_tree
from pase.frontends.jax.blocks import blocks_of
from pase.machine import Mesh, load
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.plan.layout import from_json, to_json
from pase.plan.pipeline import lines
from tests.compiler.stages.groups import MODEL, machine, setup


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
        MODEL,
        devices=4,
        machine=m,
        pipeline=2,
        mesh="2",
        accumulate=4,
        remat="none",
        memory_limit="none",
        baselines=False,
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


def test_all_devices_are_asked_for():
    with pytest.raises(PaseError, match=r"2 h100x8#0 \+ 2 h100x8#1.*, not 8") as e:
        pase.compile(MODEL, devices=8, machine=machine(speed=1.0, link=0.3e9), pipeline=2)
    assert e.value.where == "machine 'mixed'" and "devices=4" in e.value.fix


def test_the_mesh_of_a_ranks_many_devices_has_few_axes():
    """The finest mesh of 64 devices has six axes, on which the tables of a stage did not fit in 23 GB."""
    problem, _, options = setup(load("h100x8"), 256)
    groups = groups_of(problem, options)
    for devices in (64, 32, 16, 8):
        found = [m.sizes for m in rank_meshes(groups, options, devices)]
        assert (devices,) in found and max(map(len, found)) <= 4
        assert ((2,) * 4 in found) == (devices == 16)
