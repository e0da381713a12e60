"""What a loop keeps for backward is linear in its trip count, not quadratic, in every framework."""

import pytest

import pase
from pase.memory.account import memory
from pase.memory.residuals import kept, residual_bytes, written_bytes
from tests.memory.programs import JAX_LOOPS, ONNX_LOOPS, N, graph_of, jax_loop, onnx_loop, spec

ROW = 4 * N * 4
"""Bytes of the value of one iteration."""


def linear(of):
    """Check that kept bytes are linear in the trip count; return those of 8, 16 and 24 iterations.

    of: trip count -> graph.
    """
    graphs = [of(turns) for turns in (8, 16, 24)]
    found = [residual_bytes(g) for g in graphs]
    assert all(b <= written_bytes(g) for b, g in zip(found, graphs, strict=True))
    assert found[2] - found[1] == found[1] - found[0] >= 0
    return found


@pytest.mark.parametrize("name", JAX_LOOPS)
def test_what_jax_loops_keep_grows_with_their_turns(name):
    linear(lambda turns: graph_of(*jax_loop(name, turns)))


@pytest.mark.parametrize("kind", ONNX_LOOPS)
def test_what_onnx_loops_keep_grows_with_their_turns(kind):
    found = linear(lambda turns: graph_of(onnx_loop(kind, turns)))
    assert kind == "Scan" or found[0] > 8 * ROW  # a Scan is one op, whose inside is not counted


@pytest.mark.minutes
def test_what_a_tensorflow_loop_keeps_grows_with_its_turns():
    pytest.importorskip("tensorflow")
    from tests.frontends.tf.graphs import lstm

    assert linear(lambda turns: graph_of(lstm(width=N, steps=turns), dims={"batch": 4}))[0] > 8 * ROW


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["Scans", "Maps"])
def test_what_pytorch_loops_keep_grows_with_their_turns(kind):
    import torch

    from tests.frontends.torch.bodies import models

    linear(lambda turns: graph_of(getattr(models(), kind)(), torch.empty(turns, 32, 64)))


@pytest.mark.torch
def test_what_pytorchs_lstm_keeps_grows_with_its_turns():
    import torch

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(N, N)

        def forward(self, x):
            return self.lstm(x)[0].sum()

    linear(lambda turns: graph_of(Last(), torch.empty(turns, 4, N)))


def test_a_stack_is_kept_once_and_a_carry_once_a_turn():
    """A product reads the carry h, the derivative of tanh needs its result, and the loss needs the stack of h.

    JAX stacks both the result of tanh and 1 minus that result.
    """
    graph = graph_of(*jax_loop("stacked", 8))
    by_shape = {}
    for k in kept(graph).values():
        t = graph.tensors[k.tensor]
        if t.role == "activation":
            by_shape.setdefault(t.shape, []).append(k.times)
    assert by_shape == {(4, N): [8, 16], (8, 4, N): [1]}


def test_a_slice_of_a_stack_is_not_kept_beside_it():
    """The product of each iteration reads a slice of the batch, which is in memory anyway."""
    graph = graph_of(*jax_loop("maps", 8))
    assert all(graph.tensors[k.tensor].shape != (4, N) or k.times == 16 for k in kept(graph).values())
    assert (
        residual_bytes(graph) == 3 * 8 * ROW
    )  # tanh keeps two arrays per iteration, and the square keeps the stack


def test_what_a_region_keeps_inside_counts_the_turns_of_its_own_loops():
    """A loop that is recomputed as a whole has the values of all its iterations at once."""
    graph = graph_of(*jax_loop("loop_again", 8))
    (inside,) = {k.region for k in kept(graph).values()} - {None}
    of_region = [k for k in kept(graph).values() if k.region == inside]
    assert {k.times for k in of_region if graph.tensors[k.tensor].shape == (4, N)} == {8, 16}


def test_the_plan_of_a_long_loop_does_not_need_the_square_of_its_turns():
    """Row 4 of issue 32: 15.7 GiB were predicted although XLA needs 39 MiB."""
    plan = pase.compile(*jax_loop("stacked", 2000), devices=1)
    assert plan.memory.activations < 6 * 2000 * ROW
    assert plan.accumulate == 1 and not plan.remat


def test_the_account_counts_what_is_kept():
    """On one device, activations consist of the inputs and what is kept."""
    loss, p, x = jax_loop("read_again", 16)
    plan = pase.compile(loss, p, x, devices=1)
    m = memory(plan.graph, plan.mesh, {n.name: config_of(plan, n) for n in plan.graph.nodes})
    assert m.activations == residual_bytes(plan.graph) + x.size * 4 == plan.memory.activations


def config_of(plan, node):
    from pase.tables.itemize import config_of

    return config_of(node, plan.strategy[node.name], plan.mesh)


def test_the_bound_on_what_is_kept_is_what_is_written():
    graph = graph_of(lambda w, x: (jax_tanh(x @ w) ** 2).sum(), spec(N, N), spec(4, N))
    assert residual_bytes(graph) <= written_bytes(graph) <= 12 * ROW


def jax_tanh(x):
    import jax.numpy as jnp

    return jnp.tanh(x)
