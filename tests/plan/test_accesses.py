"""The layouts in which equations read and write, compared with the states of each access of each node."""

from __future__ import annotations

import numpy as np

from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts, access_states, distinct, equation_layouts
from pase.tables.layouts import blocks_of, configs, forward_states, read_states, tensor_dim, write_states
from tests.ir.graphs import simple

MESH = Mesh(names=("a", "b"), sizes=(2, 2))


def test_every_equation_has_the_layouts_of_its_accesses() -> None:
    graph, rng = simple("mlp"), np.random.default_rng(0)
    for _ in range(5):
        chosen = {n.name: rng.choice(configs(n, MESH)) for n in graph.nodes}
        states = access_states(graph, MESH, chosen)
        made = equation_layouts(graph, states)
        seen = 0
        for n in graph.nodes:
            config = chosen[n.name][None]
            for op, reads in zip(n.ops, states[n.name].reads, strict=True):
                if op.eqn not in made or n.kind in ("copy", "output", "parameter", "input"):
                    continue
                for a, row in zip(op.reads, reads, strict=True):
                    want = read_states(n, op, a, graph.tensors[a.tensor], config, MESH)[0]
                    np.testing.assert_array_equal(row, want)
                for a in op.writes:
                    t = graph.tensors[a.tensor]
                    row = forward_states(write_states(n, op, a, t, config, MESH)[0])
                    found = made[op.eqn].writes[t.original]
                    seen += 1
                    for digit, s in zip(found, row.tolist(), strict=True):
                        assert digit == ((tensor_dim(s), blocks_of(s)) if s >= 0 else None)
        assert seen > 5


def test_copies_and_outputs_have_no_equation() -> None:
    graph = simple("mlp")
    chosen = {n.name: configs(n, MESH)[0] for n in graph.nodes}
    states = access_states(graph, MESH, chosen)
    for n in graph.nodes:
        if n.kind in ("copy", "output"):
            assert all(row is None for rows in states[n.name].reads for row in rows)


def test_each_layout_is_listed_once_in_the_order_of_its_first_use() -> None:
    whole, rows, columns = (None, None), ((0, 2), None), (None, (1, 2))
    layouts = {
        1: EquationLayouts(reads={"x": rows, "w": whole}, writes={"y": rows}),
        2: EquationLayouts(reads={"y": columns}, writes={"z": whole}),
    }
    assert list(distinct(layouts)) == [rows, whole, columns]  # type: ignore[arg-type]
