"""What a baseline leaves open is filled in with the cheapest configs, by brute force over what it allows."""

from __future__ import annotations

import numpy as np
import pytest

from pase.baselines import Baseline, Intent, Skipped, baselines, price
from pase.baselines.fill_in import fill_in, fill_in_alone
from pase.errors import PaseError
from pase.ir import Node
from pase.machine import Mesh
from pase.search import brute_force
from pase.tables.build import build
from tests.baselines.helpers import H100, MODEL
from tests.ir.graphs import simple

MESH = Mesh(names=("data",), sizes=(4,))


def some(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Allow at most the first two configs of a node."""
    return np.arange(len(cfg)) < 2


def test_the_cheapest_allowed_strategy_is_found() -> None:
    graph = simple("mlp")
    tables, space = build(graph, MESH, MODEL)
    intent = Intent(name="some", mesh=MESH, allow=some)
    want = brute_force(tables.restricted({v: np.arange(min(len(c), 2)) for v, c in enumerate(space.configs)}))
    for found in (fill_in(intent, tables, space), fill_in_alone(intent, graph, MODEL)):
        assert isinstance(found, Baseline)
        assert found.cost == pytest.approx(want.cost, rel=1e-9)
        assert price(graph, found, MODEL) == pytest.approx(found.cost, rel=1e-9)
        for n, cfg in zip(graph.nodes, space.configs, strict=True):
            assert (cfg[:2] == found.strategy[n.name]).all(axis=1).any()


def test_a_node_without_an_allowed_config_is_named() -> None:
    graph = simple("mlp")
    last = graph.nodes[-1].name
    intent = Intent(name="none", mesh=MESH, allow=lambda n, cfg, m: some(n, cfg, m) & (n.name != last))
    for found in (fill_in(intent, *build(graph, MESH, MODEL)), fill_in_alone(intent, graph, MODEL)):
        assert isinstance(found, Skipped) and f"node '{last}' has no config on mesh (4,)" in found.reason


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(PaseError, match="no baseline named nothing") as e:
        baselines(simple("mlp"), 4, H100, MODEL, only=("nothing",))
    assert "data_parallel" in e.value.fix
