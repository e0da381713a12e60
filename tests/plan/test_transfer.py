"""A strategy at another size: axes that the smaller size does not allow are dropped and named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pase.errors import PaseError
from pase.ir import Graph, named, simplify
from pase.machine import Mesh
from pase.plan.transfer import shrunk_mesh, transferred
from pase.tables.itemize import split_of
from pase.tables.layouts import configs
from tests.ir.graphs import simple
from tests.plan.plans import mlp


@pytest.mark.parametrize("sizes", [(8, 4), (16, 3), (2, 2, 2), (6,)])
def test_a_mesh_shrinks_its_largest_axes_first(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(names=tuple("abc"[: len(sizes)]), sizes=sizes)
    for devices in (d for d in range(1, mesh.devices + 1) if mesh.devices % d == 0):
        small = shrunk_mesh(mesh, devices)
        assert small.names == mesh.names and math.prod(small.sizes) == devices
        assert all(n % k == 0 for n, k in zip(mesh.sizes, small.sizes, strict=True))
    with pytest.raises(PaseError, match="do not divide"):
        shrunk_mesh(mesh, mesh.devices + 1)
    assert shrunk_mesh(Mesh(names=("a", "b"), sizes=(8, 4)), 8).sizes == (2, 4)


def test_the_same_graph_keeps_every_config() -> None:
    plan = mlp()
    assert plan.traced is not None
    graph = named(simplify(plan.traced.graph))
    found, dropped = transferred(plan, graph, plan.mesh)
    assert dropped == () and set(found) == set(plan.strategy)
    for n in graph.nodes:
        assert split_of(n, found[n.name], plan.mesh) == plan.strategy[n.name]


def test_a_smaller_model_keeps_what_it_can() -> None:
    plan, small = mlp(), simple("mlp")
    found, dropped = transferred(plan, small, plan.mesh)
    for n in small.nodes:
        if n.name not in found:
            continue
        assert (configs(n, plan.mesh) == found[n.name]).all(axis=1).any()
        if n.name not in dropped:
            dims = {d.name for d in n.space}
            want = {d: axes for d, axes in plan.strategy[n.name].items() if d in dims}
            assert split_of(n, found[n.name], plan.mesh) == want
    alone, whole = transferred(plan, small, Mesh(names=plan.mesh.names, sizes=(1, 1)))
    assert whole == () and all((c == np.int8(-1)).all() for c in alone.values())


def test_another_model_is_refused() -> None:
    other: Graph = simple("gpt2")
    with pytest.raises(PaseError, match="is not that of the plan for 'zoo:mlp'"):
        transferred(mlp(), other, mlp().mesh)
