"""Wide gathers on a torus go one link dim at a time, and weights are cast before they are gathered for use."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.cases.plans import case_of
from pase import compile as pase_compile
from pase import machine, zoo
from pase.hlo.collectives import collectives
from pase.machine import Mesh, mesh_from
from pase.plan.constraints import WIDEST_GATHER, _staged, stages
from pase.tables.axis_layout import AxisLayout


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), st.data())
def test_stages_only_refine_a_gather(sizes, data):
    mesh = Mesh(names=tuple("abcd"[: len(sizes)]), sizes=tuple(sizes))
    n = len(sizes)
    when = tuple(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    have = AxisLayout(
        data.draw(st.lists(st.sampled_from([None, (0, 1), (0, 2), (0, 3)]), min_size=n, max_size=n))
    )
    then = AxisLayout(None if data.draw(st.booleans()) else s for s in have)
    rows = list(_staged([have, then], mesh, when))
    gathered = [a for a in range(n) if have[a] != then[a]]
    assert rows[-1] == then
    if np.prod([sizes[a] for a in gathered], initial=1) <= WIDEST_GATHER:
        assert len(rows) == 1
        return
    order = []
    for now, after in itertools.pairwise([have, *rows]):
        moved = {when[a] for a in range(n) if now[a] != after[a]}
        assert all(after[a] in (now[a], None) for a in range(n))
        assert len(moved) == 1  # one link dim at a time, none twice
        order += moved
    assert order == sorted(set(order))


def test_a_plan_for_a_wide_torus_gathers_in_stages():
    plan = pase_compile("zoo:gpt_1_3b?seq=1024", devices=64, mesh="8x8", machine="tpu_v5e", baselines=False)
    c = plan.jax.constraints
    wide = {t for t, made in c.define.items() if any(len(axes) == 2 for axes in made.layouts[-1])}
    steps = [
        route.layouts
        for reading, route in c.read.items()
        if reading.tensor in wide and route.layouts and not any(route.layouts[-1])
    ]
    assert len(steps) >= 6  # a block's matrices and the embedding, stored over all 64 devices and used whole
    assert sorted({len(rows) for rows in steps}) == [
        2,
        3,
    ]  # the embedding's copy also says where gradients are summed
    assert all(sum(map(len, rows[-2])) == 1 for rows in steps)


def test_stages_follow_the_links():
    v5e, h100 = machine.load("tpu_v5e"), machine.load("h100x8")
    assert stages(mesh_from("64", 64), v5e) == (1,)
    assert stages(mesh_from("8x8", 64), v5e) == (1, 0)
    assert stages(mesh_from("4x2x2x4", 64), v5e) == (1, 1, 0, 0)
    assert stages(mesh_from("8x8", 64), h100) == (0, 0)


def test_weights_are_cast_and_then_gathered_inside_the_loop():
    """FSDP of a bfloat16 GPT: the loop's body gathers a block's weights as bfloat16, twice because of recomputation."""
    import optax

    m = zoo.reduced("gpt2", dtype="bfloat16", layers=3, vocab=512)
    plan = case_of(m.loss_fn, m.params, m.batch).plan("fsdp")
    lowered = plan.jax.lower_train_step(optax.adam(1e-3), lowering="annotated")
    blocks = m.params["blocks"]
    weights = {leaf.shape[1:] for leaf in jax.tree.leaves(blocks) if np.prod(leaf.shape[1:]) > 256}
    whole = re.findall(
        r"sharding_constraint .* <@mesh, \[(?:\{\}(?:, )?)+\]> : tensor<([0-9x]+)x(\w+)>", lowered.as_text()
    )
    gathered = [dtype for dims, dtype in whole if tuple(map(int, dims.split("x"))) in weights]
    assert len(gathered) >= 2 * len(weights) and set(gathered) == {"bf16"}
    found = [c for c in collectives(lowered.compile()) if c.kind == "all_gather"]
    sizes = {int(np.prod(w)) for w in weights}
    # The CPU backend sends bfloat16 as float32, so elements are counted instead of bytes.
    turns = [c.count for c in found for n in c.parts if n // 4 in sizes]
    assert len(turns) >= 2 * len(weights) and set(turns) == {3}
