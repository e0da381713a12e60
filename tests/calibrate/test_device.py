"""The programs that a calibration times on a device: what they compute, and on which operands."""

import numpy as np
import pytest

from pase.calibrate import Task
from pase.calibrate.device import block_loss
from pase.calibrate.types import CONV_OPS, LIGHT_BYTES, LIGHT_SHAPES
from pase.machine import Mesh


def test_the_light_ops_are_what_the_graph_of_their_block_says():
    """LIGHT_BYTES equals the bytes that the frontend and the rule of local work find for the block without products."""
    import jax

    from pase.frontends.jax.frontend import trace
    from pase.ir import simplify
    from pase.tables.work import node_work

    (*rows, d), (*_, f) = LIGHT_SHAPES
    first, bias, up, down = (
        jax.ShapeDtypeStruct(shape, "float32") for shape in ((*rows, d), (d,), (d, f), (f, d))
    )
    graph = simplify(
        trace(lambda p, x: block_loss(x + p[0], *p[1]), (bias, [up, down, up]), first, name="block").graph
    )
    light = []
    for node in graph.nodes:
        for w in node_work(graph, node, np.full((1, 1), -1, np.int8), Mesh(names=("a",), sizes=(1,))):
            if w.phase != "update" and w.kind != "matmul":
                light.append(float(np.ravel(w.nbytes)[0]))
    assert sum(light) == pytest.approx(LIGHT_BYTES, rel=1e-3)


def test_the_light_ops_are_those_of_the_blocks_own_step():
    """Given the results of the step's matrix products, they compute its values and gradients."""
    import jax
    import jax.numpy as jnp

    from pase.calibrate.device import local_program

    draw = iter(jax.random.split(jax.random.key(0), 9))
    x, up, down, out = (
        jax.random.normal(next(draw), s, "float32") for s in ((2, 3, 8), (8, 16), (16, 8), (8, 16))
    )

    def probed(x, e_norm, e_hidden, e_sum, e_logits):
        centred = x - jnp.mean(x, -1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6) + e_norm
        hidden = normed @ up + e_hidden
        after = x + jax.nn.gelu(hidden) @ down + e_sum
        logits = after @ out + e_logits
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0]), (normed, hidden, after, logits)

    zeros = [jnp.zeros(s) for s in ((2, 3, 8), (2, 3, 16), (2, 3, 8), (2, 3, 16))]
    (loss, made), back = jax.value_and_grad(probed, argnums=range(5), has_aux=True)(x, *zeros)
    (normed, hidden, after, logits), (dx, d_norm, d_hidden, d_sum, d_logits) = made, back
    _, light, _ = local_program(Task(op="light"))
    to_hidden = d_sum @ down.T
    got = light(x, after - x, d_norm, d_sum, hidden, to_hidden, logits)
    want = [loss, normed, jax.nn.gelu(hidden), after, d_logits * loss, d_hidden, dx]
    for a, b in zip(got, want, strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extents", [(2, 8, 3, 5, 3), (2, 6, 4, 2, 1), (2, 9, 3, 4, 5)])
@pytest.mark.parametrize("op", CONV_OPS[1:])
def test_gradients_of_convolutions_as_a_cpu_runs_them_are_the_gradients(op, extents):
    from pase.calibrate.device import local_program

    shapes, plain, _ = local_program(Task(op=op, extents=extents))
    same, on_cpu, _ = local_program(Task(op=op, extents=extents), on_cpu=True)
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape).astype(np.float32) for shape, _ in shapes]
    want, got = np.asarray(plain(*operands)), np.asarray(on_cpu(*operands))
    if op == "conv.filter":  # in the compiler's layout: channels in, rows, columns, channels out
        got = got.transpose(1, 2, 0, 3)
    assert same == shapes and np.allclose(got, want, atol=1e-4)


def test_operands_are_taken_in_turn_and_no_op_is_skipped():
    import jax.numpy as jnp

    from pase.calibrate.device import _in_turns, sets_of

    def op(x, y):
        return [x + y, (x * y).sum()[None]]

    sets = [[np.full((1, 2), a, np.float32), np.full((1, 2), b, np.float32)] for a, b in ((1, 2), (3, 4))]
    results = [[np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)] for _ in sets]
    after, made = _in_turns(op)(2, [[jnp.array(x) for x in s] for s in sets], results)
    seed, x = 0.0, [s[0][0].copy() for s in sets]
    for _ in range(2):
        want = []
        for i, (_, y) in enumerate(sets):
            x[i][0] = seed
            want.append((x[i] + y[0], (x[i] * y[0]).sum()))
            seed = want[-1][0][0] + want[-1][1]
    for (a, b), (c, d), s, first in zip(made, want, after, x, strict=True):
        assert np.allclose(a[0], c) and float(b[0][0]) == d and np.allclose(s[0][0], first)
    large = [((4096, 4096), "float32")] * 2
    assert (
        sets_of(Task(op="matmul.nn"), large) == 1
        and sets_of(Task(op="matmul.nn"), [((8, 8), "float32")]) == 16
    )
    assert sets_of(Task(op="matmul.nn"), [((1024, 1024), "bfloat16")]) == 8
    assert (
        sets_of(Task(op="vector"), [((8, 8), "float32")])
        == sets_of(Task(op="all_reduce", ways=(2,)), large)
        == 1
    )
