"""The features of any split are its seconds and no more than its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from pase.compiler.stages.costs import CostKind, part_costs
from pase.compiler.stages.features import Feature
from pase.search.check import cost_of
from tests.compiler.stages.staged import SCANNED, WRITTEN_OUT, tables_of


@pytest.mark.some(3)
@pytest.mark.parametrize("model", [SCANNED, WRITTEN_OUT])
@pytest.mark.parametrize("weights", ["hoisted", "each"])
@pytest.mark.parametrize("again", [False, True])
def test_the_features_of_any_split_are_its_seconds_and_no_more_than_its_bytes(model, weights, again):
    t = tables_of(model, 4, weights, again)
    space, rng = t.features.space, np.random.default_rng(0)
    for _ in range(5):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(space.graph.nodes, space.configs, choice, strict=True)}
        parts = part_costs(t.graph, t.places, t.mesh, configs, t.model, "adam", weights)
        for part in ("first", "block", "last"):
            share = 1 / t.places.blocks if part == "block" else 1.0
            shares = [share * (part in t.places.parts[n.name]) for n in space.graph.nodes]
            for f in Feature:
                tables = t.features.weighted(np.eye(len(Feature))[f], shares)
                found, told = cost_of(tables, choice), parts[part]
                whole = told[CostKind[f.name]]
                if f.name.startswith("INPUT"):
                    whole += told[CostKind[f.name.replace("INPUT", "RECOMPUTE")]]
                if f <= Feature.AFTER:
                    assert found == pytest.approx(whole, rel=1e-9, abs=1e-15)
                else:
                    assert found <= whole * (1 + 1e-9) + 1e-6
