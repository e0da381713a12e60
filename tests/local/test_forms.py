"""Reshard steps take the form that the machine's compiler runs fastest: values stay the same, the form is the cheapest,
and the program that XLA compiles has it."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from bench.cases.plans import case_of
from pase import costmodels, machine
from pase.errors import PaseError
from pase.local.account import program_collectives
from pase.local.forms import _forms, form_of, in_forms, price_of
from pase.local.simulate import whole_of
from pase.local.types import LocalReshardStep
from pase.local.verify import verify_program
from pase.machine import CompiledForm, mesh_from
from pase.tables.axis_layout import AxisLayout
from tests.local.layouts import SHAPE, cases, chain, held, moved

V5E = costmodels.get("analytic", machine.load("tpu_v5e"))
BARE = costmodels.get("analytic", replace(machine.load("tpu_v5e"), forms=()))
MESH = mesh_from("8x8", 64)


def scattered(nbytes, mesh=MESH):
    """A reduce-scatter of a whole gradient over all axes, along one dim."""
    blocks = [int(np.prod(mesh.sizes[: k + 1])) for k in range(len(mesh.sizes))]
    after = AxisLayout((0, b) for b in blocks)
    before = AxisLayout(["partial"] * len(after))
    return LocalReshardStep(kind="reduce_scatter", axes=mesh.names, before=before, after=after, nbytes=nbytes)


def gathered(nbytes, mesh=MESH):
    """The all-gather that reverses ``scattered``."""
    there = scattered(nbytes, mesh)
    return replace(there, kind="all_gather", before=there.after, after=AxisLayout.whole(mesh))


def test_a_sum_over_all_chips_of_a_square_goes_in_two_stages():
    """As one collective it would be compiled to an all-reduce of the whole buffer. The first stage takes as many chips
    as it can, over links of both dims of the torus. Over all chips of 4 x 8, one reduce-scatter is enough."""
    form = form_of(scattered(32 << 20), MESH, V5E)
    assert [(m.kind, len(m.axes), m.nbytes) for m in form] == [
        ("reduce_scatter", 1, 32 << 20),
        ("reduce_scatter", 1, 4 << 20),
    ]
    assert price_of(form, MESH, V5E) < price_of((scattered(32 << 20),), MESH, V5E)
    assert len(form_of(scattered(32 << 20), MESH, BARE)) == 1
    narrow, fine, small = mesh_from("4x8", 32), mesh_from("2x4x8", 64), mesh_from("4x4", 16)
    assert len(form_of(scattered(32 << 20, narrow), narrow, V5E)) == 1
    assert len(form_of(scattered(2 << 20, small), small, V5E)) == 2
    both = form_of(scattered(32 << 20, fine), fine, V5E)
    assert [(m.axes, m.nbytes) for m in both] == [(("y", "z"), 32 << 20), (("x",), 1 << 20)]
    assert price_of(both, fine, V5E) < 0.7 * price_of(form, MESH, V5E)


def test_wide_gathers_of_small_tensors_go_in_stages():
    """Gathers over 64 chips and below 20 MB take two stages; the last one receives the whole tensor. Gathers over 32
    chips, and larger ones, are one collective."""
    form = form_of(gathered(4 << 20), MESH, V5E)
    assert [(m.kind, m.nbytes) for m in form] == [("all_gather", 512 << 10), ("all_gather", 4 << 20)]
    assert len(form_of(gathered(64 << 20), MESH, V5E)) == 1
    narrow = mesh_from("4x8", 32)
    assert len(form_of(gathered(4 << 20, narrow), narrow, V5E)) == 1


@given(cases())
def test_every_form_brings_the_same(case):
    """All forms bring exactly the same elements, in numpy on all devices, also for dims that several axes split."""
    mesh, src, dst, x = case
    for move in chain(src, dst, mesh):
        parts = held(x, move.before, mesh)
        try:
            wanted = moved(parts, [move], SHAPE, mesh)
        except PaseError:
            return
        move = replace(move, nbytes=x.nbytes)
        for form in _forms(move, mesh):
            assert (form[0].before, form[-1].after) == (move.before, move.after)
            got = moved(parts, form, SHAPE, mesh)
            assert (got == wanted).all()
            if len(form) > 1:  # the largest buffer is that of the whole step
                assert max(m.nbytes for m in form) == move.nbytes


def test_only_what_the_compiler_changes_is_asked_for_otherwise():
    m = replace(
        machine.load("tpu_v5e"),
        forms=(
            CompiledForm(kind="all_gather", becomes="all_reduce", levels=2, more_than=8, below_bytes=100),
        ),
    )
    for kind, levels, ways, nbytes in itertools.product(
        ("all_gather", "reduce_scatter"), (1, 2), (8, 16), (99, 100)
    ):
        changed = (kind, levels, ways, nbytes) == ("all_gather", 2, 16, 99)
        at = (ways,) if levels == 1 else (ways // 2, 2)
        assert (m.as_compiled(kind, at, 64, nbytes) == "all_reduce") == changed
    assert (
        m.digest == machine.load("tpu_v5e").digest
    )  # forms do not change a plan's price, so not the digest either


def step_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


@pytest.fixture(scope="module")
def stored_over_two():
    """A plan that stores a parameter over two axes and gathers it over both at once."""
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(32, 64)) / 8, "b": rng.normal(size=(64, 32)) / 8}
    params = jax.tree.map(lambda v: jnp.asarray(v, "float32"), params)
    x = jnp.asarray(rng.normal(size=(16, 32)), "float32")
    case = case_of(step_of, params, x)
    for k in range(40):
        plan = case.plan(f"random{k}@4x2")
        found = [c for c in plan.collectives if c.kind == "reduce_scatter" and len(c.axes) == 2]
        if found:
            return plan, params, x
    pytest.fail("no strategy scatters a sum over two axes")


def test_the_step_sends_the_stages(stored_over_two):
    """If sums over two link levels are staged level by level, XLA's text has a reduce-scatter for each stage, and the
    gradients stay the same."""
    plan, params, x = stored_over_two
    plain = plan.jax
    by_level = CompiledForm(kind="reduce_scatter", becomes="all_reduce", levels=2)
    v5e = replace(machine.load("tpu_v5e"), forms=(by_level,))
    staged = replace(plain, model=costmodels.get("analytic", v5e))
    verify_program(staged.program)
    assert in_forms(plain.program, BARE) is plain.program
    sums = [c for c in program_collectives(staged.program) if c.kind == "reduce_scatter"]
    assert all(len(c.axes) == 1 for c in sums)
    counts = []
    for jp in (plain, staged):
        graded = jax.jit(jp.value_and_grad(lowering="manual"))
        placed = jp.device_put(params, x)
        loss, grads = graded(*placed)
        wanted, by_one = jax.value_and_grad(step_of)(params, x)
        np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, by_one)
        text = graded.lower(*placed).compile().as_text()
        counts.append(len(re.findall(r" reduce-scatter(?:-start)?\(", text)))
    assert counts[1] > counts[0] and counts[1] == len(sums)


def test_parts_of_forms_are_whole(stored_over_two):
    """After every form, the devices hold the whole tensor."""
    mesh = mesh_from("2x4", 8)
    move = gathered(1024, mesh)
    x = np.arange(16 * 8.0).reshape(16, 8)
    for form in _forms(move, mesh):
        parts = moved(held(x, move.before, mesh), form, (16, 8), mesh)
        assert (whole_of(parts, (16, 8), move.after, mesh) == x).all()
