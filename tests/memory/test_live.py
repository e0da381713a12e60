"""Arrays that are alive in a program that is not trained: by hand, and by simulating which tensors are still read."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import Mesh
from pase.memory.live import is_trained, live_bytes, lives
from tests.ir.graphs import simple

ONE = Mesh(names=("a",), sizes=(1,))
F32 = 4


def graph_of(fn, *args, **options) -> Graph:  # type: ignore[no-untyped-def]
    return named(simplify(trace(fn, *args, mode="inference", **options).graph))


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def alone(graph: Graph) -> float:
    """Return the peak on one device."""
    return live_bytes(graph, ONE, {n.name: np.full(1, -1, np.int8) for n in graph.nodes})


def test_only_a_loss_is_trained() -> None:
    assert is_trained(simple("mlp"))
    assert not is_trained(graph_of(lambda w, x: x @ w, spec(8, 8), spec(4, 8)))


def test_a_chain_of_products_holds_two_results_at_a_time() -> None:
    def chain(w, x):  # type: ignore[no-untyped-def]
        for p in w:
            x = x @ p
        return x

    shapes = [(16, 32), (32, 64), (64, 8), (8, 4)]
    graph = graph_of(chain, [spec(*s) for s in shapes], spec(128, 16))
    results = [128 * n * F32 for _, n in shapes]
    assert alone(graph) == max(a + b for a, b in itertools.pairwise(results))


def test_a_residual_stays_until_it_is_read() -> None:
    def skip(w, x):  # type: ignore[no-untyped-def]
        first = x @ w["a"]
        return (first @ w["b"]) @ w["c"] + first

    graph = graph_of(skip, {"a": spec(8, 32), "b": spec(32, 256), "c": spec(256, 32)}, spec(64, 8))
    first, wide, last = (64 * n * F32 for n in (32, 256, 32))
    assert alone(graph) == first + wide + last
    known = lives(graph)
    for group, start, stop in zip(known.members, known.first, known.last, strict=True):
        readers = [i for i, n in enumerate(graph.nodes) for _, a in n.reads if a.tensor in group]
        assert start <= stop and all(start <= i <= stop for i in readers)


def test_what_a_loop_reads_from_outside_lives_as_long_as_it_runs() -> None:
    def loop(w, x):  # type: ignore[no-untyped-def]
        table = jnp.sin(x) @ w

        def body(h, _):  # type: ignore[no-untyped-def]
            return jnp.tanh(h @ w + table), None

        return jax.lax.scan(body, x @ w, None, length=5)[0]

    graph = graph_of(loop, spec(32, 32), spec(64, 32))
    known = lives(graph)
    inside = [i for i, n in enumerate(graph.nodes) if any(s.kind == "loop" for s in n.main.loops)]
    before, reading = graph.nodes[: inside[0]], {a.tensor for i in inside for _, a in graph.nodes[i].reads}
    read = {a.tensor for n in before for op in n.ops for a in op.writes} & reading & known.array.keys()
    carried = {t for n in before if n.kind == "carry" for op in n.ops for t in (a.tensor for a in op.writes)}
    assert len(read - carried) == 2  # the weight and the table
    assert all(known.last[known.array[t]] >= inside[-1] for t in read)
    # Each iteration writes over the array of the one before.
    (carry,) = carried
    assert len(known.members[known.array[carry]]) == 3


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_a_batch_that_is_split_holds_a_part_on_each_device(ways: int) -> None:
    weights = {"a": spec(8, 32), "b": spec(32, 16)}
    graph = graph_of(lambda w, x: (x @ w["a"]) @ w["b"], weights, spec(64, 8))
    mesh = Mesh(names=("a",), sizes=(ways,))
    configs = {
        n.name: np.array([next((i for i, d in enumerate(n.space) if d.size == 64 and ways > 1), -1)], np.int8)
        for n in graph.nodes
    }
    assert live_bytes(graph, mesh, configs) == 64 * (32 + 16) * F32 / ways
