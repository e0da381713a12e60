"""What a report's page draws: the layers of the model, and a step as long as its price."""

from __future__ import annotations

import pytest

from pase.api import Plan
from pase.questions.report_data import PARAMETERS, layer_paths, priced_step


def test_layers_are_those_of_the_model(plan: Plan) -> None:
    paths = layer_paths(plan.nodes)
    products = [n.name for n in plan.nodes if n.op == "matmul" and n.name.startswith("blocks.attention")]
    assert products and {tuple(paths[p]) for p in products} == {("blocks", "attention")}
    assert paths["blocks.ff.w1"] == ["blocks", "ff", PARAMETERS]
    order = [n for n in paths if paths[n][-1] != PARAMETERS]
    assert order == [n.name for n in plan.nodes if n.op != "parameter"]


def test_the_priced_step_is_as_long_as_its_price(plan: Plan) -> None:
    drawn = priced_step(plan)
    assert drawn["end"] / 1e9 == pytest.approx(plan.cost + plan.hidden, rel=1e-3)
    for s in drawn["streams"]:
        ends = [a + n for a, n in zip(s["start"], s["length"], strict=True)]
        assert all(b >= e for e, b in zip(ends, s["start"][1:], strict=False))
