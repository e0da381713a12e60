"""A strategy that follows the layouts of its inputs: nothing is resharded if they allow it."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from bench.cases.plans import case_of
from pase.local.follow import followed
from pase.local.lower import local_program
from pase.local.verify import verify_program
from pase.machine import mesh_from
from pase.tables.axis_layout import AxisLayout

MESH = mesh_from("2x4", 8)


@functools.cache
def graph():
    def fn(p, x):
        return jnp.sum(jnp.tanh(x @ p["up"]) @ p["down"])

    params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8))}
    return case_of(fn, params, jnp.ones((8, 8))).problem.graph


def program_for(up, down, x):
    """The local program that follows these layouts, and the collectives of its transfers."""
    up, down, x = map(AxisLayout, (up, down, x))
    g = graph()
    path = {t.path or "x": t.name for t in (*g.parameters, *g.inputs)}
    leaves = {path["up"]: up, path["down"]: down} | {t.name: x for t in g.inputs}
    program = local_program(g, MESH, followed(g, MESH, leaves))
    verify_program(program)
    held = {r.tensor: r.layout for op in program.ops for r in op.results}
    assert {t: held[t] for t in leaves} == leaves
    return program, [(m.kind, t.dst) for t in program.transfers for m in t.forward if not m.free]


def test_a_batch_that_is_split_stays_split():
    """Both axes split the batch, so no value is sent until the loss is summed."""
    program, sent = program_for((None, None), (None, None), ((0, 2), (0, 8)))
    assert [kind for kind, _ in sent] == ["all_reduce"] and sent[0][1].startswith("output@")
    rows = [o.layout for op in program.ops for o in op.operands if o.shape and o.shape[0] == 8]
    assert ((0, 2), (0, 8)) in rows


def test_split_columns_and_rows_of_two_products_are_summed_once():
    """Megatron's split of two products: the columns of the first and the rows of the second, one all-reduce."""
    _, sent = program_for((None, (1, 4)), (None, (0, 4)), (None, None))
    assert [kind for kind, _ in sent] == ["all_reduce"] and sent[0][1].startswith("reduce@")


@pytest.mark.parametrize("seed", range(10))
def test_any_layouts_of_the_inputs_are_kept(seed):
    rng = np.random.default_rng(seed)

    def layout():
        dims = [None if d < 0 else int(d) for d in rng.integers(-1, 2, 2)]
        ways = {d: 1 for d in dims}
        out = []
        for d, n in zip(dims, MESH.sizes, strict=True):
            ways[d] *= n
            out.append(None if d is None else (d, ways[d]))
        return tuple(out)

    program_for(layout(), layout(), layout())
