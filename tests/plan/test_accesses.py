"""The layouts in which equations read and write, compared with the states of each access of each node."""

from __future__ import annotations

import numpy as np

from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts, access_layouts, distinct, equation_layouts
from pase.tables.axis_layout import AxisLayout, forward_states
from pase.tables.layouts import configs, read_rule, write_rule
from tests.ir.graphs import simple

MESH = Mesh(names=("a", "b"), sizes=(2, 2))


def test_every_equation_has_the_layouts_of_its_accesses() -> None:
    graph, rng = simple("mlp"), np.random.default_rng(0)
    for _ in range(5):
        chosen = {n.name: rng.choice(configs(n, MESH)) for n in graph.nodes}
        layouts = access_layouts(graph, MESH, chosen)
        made = equation_layouts(graph, layouts)
        seen = 0
        for n in graph.nodes:
            config = chosen[n.name][None]
            for op, reads in zip(n.ops, layouts[n.name].reads, strict=True):
                if op.eqn not in made or n.kind in ("copy", "output", "parameter", "input"):
                    continue
                for a, read in zip(op.reads, reads, strict=True):
                    want = read_rule(n, op, a).states(config, MESH)[0]
                    assert read is not None and read.gradient.states == tuple(want)
                for a in op.writes:
                    row = forward_states(write_rule(n, op, a).states(config, MESH)[0])
                    seen += 1
                    found = made[op.eqn].writes[graph.tensors[a.tensor].original]
                    assert found == AxisLayout.of(row).summed
        assert seen > 5


def test_copies_and_outputs_have_no_equation() -> None:
    graph = simple("mlp")
    chosen = {n.name: configs(n, MESH)[0] for n in graph.nodes}
    layouts = access_layouts(graph, MESH, chosen)
    for n in graph.nodes:
        if n.kind in ("copy", "output"):
            assert all(row is None for rows in layouts[n.name].reads for row in rows)


def test_each_layout_is_listed_once_in_the_order_of_its_first_use() -> None:
    whole, rows, columns = map(AxisLayout, ((None, None), ((0, 2), None), (None, (1, 2))))
    layouts = {
        1: EquationLayouts(reads={"x": rows, "w": whole}, writes={"y": rows}),
        2: EquationLayouts(reads={"y": columns}, writes={"z": whole}),
    }
    assert list(distinct(layouts)) == [rows, whole, columns]  # type: ignore[arg-type]
