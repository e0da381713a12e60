"""ZeRO's split of gradients and optimizer state, against collectives and bytes computed independently."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import costmodels, machine
from pase.ir import Access, AccessMap, Dim, IterationSpace, Node, Op, functions
from pase.machine import BUCKET_BYTES, Mesh
from pase.tables.build import GRANULE_BYTES, build
from pase.tables.layouts import (
    NOT_SPLIT,
    blocks_of,
    configs,
    forward_states,
    gradient_states,
    state_index,
    tensor_dim,
    write_rule,
)
from tests.ir.graphs import simple
from tests.tables.strategies import meshes

MACHINE = machine.load("h100x8")
MODEL = costmodels.get("analytic", MACHINE)


def parameter(shape: tuple[int, ...]) -> Node:
    names = [f"d{i}" for i in range(len(shape))]
    dims = [Dim(name=n, size=s) for n, s in zip(names, shape, strict=True)]
    write = Access("w", AccessMap.of(*names))
    op = Op(
        name="parameter", kind="parameter", function=functions.BY_KIND["parameter"], reads=(), writes=(write,)
    )
    space = IterationSpace((*dims, Dim(name="state", size=0, kind="state")))
    return Node(name="w", space=space, ops=(op,))


@settings(max_examples=150)
@given(st.data(), meshes(), st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3))
def test_shards_of_the_state_cover_the_parameter_once(data, mesh: Mesh, shape: list[int]) -> None:
    """Element by element: devices that differ on a state axis hold different shards of the gradient, and devices that
    differ on a storage axis hold different shards of both. A parameter shard consists of whole gradient shards."""
    node = parameter(tuple(shape))
    (state,) = state_index(node)
    cfg = configs(node, mesh)
    row = cfg[data.draw(st.integers(0, len(cfg) - 1))]
    written = write_rule(node, node.ops[0], node.ops[0].writes[0]).states(row[None], mesh)[0]

    def holds(states: np.ndarray) -> dict[tuple[int, ...], frozenset[int]]:
        out = {}
        index = np.arange(prod(shape)).reshape(shape)
        for device in itertools.product(*map(range, mesh.sizes)):
            mine = np.ones(shape, dtype=bool)
            for a, s in enumerate(states):
                if s >= 0:
                    t, blocks = tensor_dim(int(s)), blocks_of(int(s))
                    digit = np.indices(shape)[t] * blocks // shape[t] % mesh.sizes[a]
                    mine &= digit == device[a]
            out[device] = frozenset(index[mine].tolist())
        return out

    whole, part = holds(forward_states(written)), holds(gradient_states(written))
    assert all(part[d] <= whole[d] for d in whole)
    ways = prod(n for n, c in zip(mesh.sizes, row, strict=True) if c == state)
    assert all(len(part[d]) * ways == len(whole[d]) for d in whole)
    for d in whole:
        group = [e for e in whole if all(x == y or c == state for x, y, c in zip(d, e, row, strict=True))]
        assert frozenset().union(*(part[e] for e in group)) == whole[d]


def test_an_axis_that_divides_no_dim_cannot_split_the_state() -> None:
    mesh = Mesh(names=("a",), sizes=(4,))
    assert configs(parameter((6, 10)), mesh).tolist() == [[NOT_SPLIT]]
    assert configs(parameter((6, 8)), mesh).tolist() == [[NOT_SPLIT], [1], [2]]


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_every_config_of_a_parameter_costs_what_its_parts_do(model: str) -> None:
    """Independent prices on one axis, which also splits the batch: replicated, stored split, or only its state
    split."""
    graph, mesh = simple(model), Mesh(names=("a",), sizes=(8,))
    tables, space = build(graph, mesh, MODEL)
    at = {n.name: v for v, n in enumerate(graph.nodes)}
    checked = 0

    def seconds(kind: str, nbytes: float) -> float:
        def one(n: float) -> float:
            return float(MODEL.collective(kind, mesh, np.array([1]), np.array([n]))[0])

        sent = max(nbytes, 8 * GRANULE_BYTES)  # each device's shard is padded to whole granules
        return one(nbytes) if sent >= BUCKET_BYTES else one(BUCKET_BYTES) * sent / BUCKET_BYTES

    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        rows = [t for t in tables.edges if (t.src, t.dst) == (at[e.src], at[e.dst])]
        if src.kind != "parameter" or dst.kind != "matmul" or len(rows) != 1 or not state_index(src):
            continue
        tensor, op = graph.tensors[e.tensor], e.op
        batch = next(i for i, d in enumerate(dst.space) if d.name == "b")
        j = int(np.flatnonzero(space.configs[at[e.dst]][:, 0] == batch)[0])
        dense, nbytes, times = rows[0].dense()[:, j], float(tensor.nbytes), float(op.times)
        for i, (c,) in enumerate(space.configs[at[e.src]]):
            reduce = "all_reduce" if c == NOT_SPLIT else "reduce_scatter"
            want = times * seconds(reduce, nbytes)
            if c != NOT_SPLIT and c != state_index(src)[0]:
                want += times * (2 if e.access.recompute else 1) * seconds("all_gather", nbytes)
            assert dense[i] == pytest.approx(want, rel=1e-9)
        vector, (s,) = tables.node_costs[at[e.src]], state_index(src)
        whole = float(graph.tensors[src.ops[0].writes[0].tensor].nbytes)
        by = {int(c): float(v) for (c,), v in zip(space.configs[at[e.src]], vector, strict=True)}
        # The update of an eighth, and the casts of the whole parameter.
        casts = by[s] - seconds("all_gather", whole)
        assert casts < by[NOT_SPLIT]
        checked += 1
    assert checked > 1
