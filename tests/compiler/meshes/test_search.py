"""The search over meshes: what it lists."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pase.compiler.meshes.search import search_meshes
from pase.machine import mesh_from
from pase.search import Solution

FREE = np.zeros(0, np.int64)


def test_a_mesh_is_listed_with_the_answer_of_its_further_search() -> None:
    """The list of meshes has the cost that ``close`` finds for the mesh."""

    class TwoSteps:
        space = staticmethod(lambda mesh: None)
        glance = staticmethod(lambda mesh: 1.0)
        solve = staticmethod(lambda mesh, below: Solution(choice=FREE, cost=2.0, bound=1.0, optimal=False))
        close = staticmethod(lambda mesh, below: Solution(choice=FREE, cost=1.5, bound=1.5, optimal=True))

    mesh = mesh_from("2x4", 8)
    found = search_meshes(SimpleNamespace(pricing=TwoSteps()), [mesh])  # type: ignore[arg-type]
    assert found.solution.cost == 1.5
    assert found.tried == ((mesh, 1.5),)
