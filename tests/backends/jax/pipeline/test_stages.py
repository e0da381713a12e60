"""Stages pass on exactly what the plan predicts: activations forward, and the gradients of those that have one back."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.backends.jax.pipeline.stages import stages_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.stages.menu import FIRST, LAST, StageDevices, StageTables
from pase.compiler.stages.places import places_of
from pase.compiler.stages.search import StageMenu
from pase.frontends.blocks import block_ways
from pase.frontends.jax.frontend import trace
from pase.machine import Mesh
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import StageTimes

WIDTH, LAYERS, BATCH, SEQ = 16, 4, 8, 4


def counting(params, tokens):
    """Layers that pass on activations, an integer per example without a gradient, scales and a counter."""
    x = params["embed"][tokens]

    def block(carried, w):
        x, seen, scale, i = carried
        h = jnp.tanh(x @ w) * scale[..., None]
        seen = seen + (h > 0).sum((1, 2)).astype(jnp.int32)
        return (x + h * (seen > 3)[:, None, None], seen, jnp.abs(h).mean(-1) + 1, i + 1), None

    first = (x, jnp.zeros(tokens.shape[:1], jnp.int32), jnp.ones(tokens.shape), 0)
    (x, *_), _ = jax.lax.scan(block, first, params["blocks"])
    return (x @ params["head"]).mean()


@cache
def traced():
    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    params = {
        "embed": shape(32, WIDTH),
        "blocks": shape(LAYERS, WIDTH, WIDTH),
        "head": shape(WIDTH, 8),
    }
    return trace(counting, params, shape(BATCH, SEQ, dtype=jnp.int32))


def test_what_crosses_is_what_the_program_hands_on():
    graph = graph_of(traced(), Variant(accumulate=2))
    crossing = [graph.tensors[tensor] for _, tensor in places_of(graph).crossing]
    micro = block_ways(traced()).micro(traced(), 2)
    names = [str(i) for i in range(len(micro.jaxpr.jaxpr.invars))]
    _, second = stages_of(micro, names, (2, 2))
    sent = [second.avals[key] for key in second.enters]
    assert sorted((t.shape, t.dtype) for t in crossing) == sorted((x.shape, str(x.dtype)) for x in sent)
    assert {t.dtype for t in crossing if not t.needs_grad} == {"int32"} and len(crossing) == 4


def doubled(params, x):
    """A stack that is scaled before the loop, and one whose gradient the loss reads besides."""
    stack, both = params["stack"] * 0.5, params["both"] * params["scale"]
    h, seen = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w[0] @ w[1]), h.mean()), x, (stack, both))
    return jnp.mean(h**2) + seen.sum() + (both**2).mean()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stage_has_only_its_rows_of_a_stack_unless_something_reads_all_of_it(wrapped):
    shape = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    params = {"stack": shape, "both": shape, "scale": jax.ShapeDtypeStruct((), jnp.float32)}
    model = trace(
        jax.jit(doubled) if wrapped else doubled, params, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    )
    first, second = stages_of(model, [str(i) for i in range(4)], (1, 3))
    assert model.param_paths == ("both", "scale", "stack")
    assert [w.rows for w in first.weights] == [None, None, (0, 1)]
    assert [w.rows for w in second.weights] == [None, None, (1, 4)]
    assert first.read_whole == second.read_whole == {0, 1}


def written_out(params, tokens):
    """Layers that pass on one tensor, which the next one reads twice: in its norm and in its residual connection."""
    x = params["embed"][tokens]
    for w in params["layers"]:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True))
        x = x + jnp.tanh(h @ w["up"]) @ w["down"]
    return (x @ params["head"]).mean()


def test_of_layers_that_are_written_out_their_results_alone_cross():
    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    layer = {"up": shape(WIDTH, WIDTH), "down": shape(WIDTH, WIDTH)}
    params = {"embed": shape(32, WIDTH), "layers": [layer] * LAYERS, "head": shape(WIDTH, 8)}
    model = trace(written_out, params, shape(BATCH, SEQ, dtype=jnp.int32))
    graph = graph_of(model, Variant(accumulate=2))
    crossing = places_of(graph, block_ways(model).blocks_of(model)).crossing
    assert [graph.tensors[t].shape for _, t in crossing] == [(BATCH // 2, SEQ, WIDTH)]


def test_gradients_alone_are_sent_back():
    variant, problem = Variant(accumulate=2), SplitProblem.of(traced().graph, 4, "h100x8", "analytic", "adam")
    graph, mesh = graph_of(traced(), variant), Mesh(names=("x",), sizes=(2,))
    t = StageTables(
        graph, places_of(graph), variant, StageDevices(mesh=mesh, model=problem.model), "adam", "each"
    )
    menu = StageMenu([t], 2, 2, np.inf)
    one, other = t.cheapest(FIRST, 2.0), t.cheapest(LAST, 2.0)
    there, back = menu.sent_bytes(one)
    assert 0 < there - back < back
    send = menu.problem(schedule("1f1b", 2, 2), (one, other)).fixed.send
    assert send.shape == (2, 1) and send[1, 0] < send[0, 0]
    least = menu.least_send_s()
    assert (np.array(least) <= send[:, 0]).all() and least[1] < least[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_each_way_has_its_own_seconds(name):
    s = schedule(name, 2, 1)
    t = StageTimes.of([1.0, 1.0], 2.0, 0.0, ranks=2, send=[[0.5], [0.25]])
    done = simulate(s, t)
    assert done.step_s == 6.75 and done.path.crossed.tolist() == [[1.0], [1.0]]
    assert done.path.seconds(t) == 6.75
