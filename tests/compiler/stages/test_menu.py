"""The parts of a stage add up to what the tables price."""

from __future__ import annotations

import pytest

from pase.compiler.stages.menu import FIRST, LAST, MIDDLE, ONLY
from tests.compiler.stages.staged import SCANNED, WRITTEN_OUT, tables_of


@pytest.mark.parametrize("model", [SCANNED, WRITTEN_OUT])
@pytest.mark.parametrize("weights", ["hoisted", "each"])
@pytest.mark.parametrize("again", [False, True])
def test_the_parts_of_a_stage_are_what_the_tables_price(model, weights, again):
    """A stage's parts add up to the search's own cost. With all blocks and both ends they are the whole model."""
    t = tables_of(model, 4, weights, again)
    many = t.places.blocks
    assert many == (8 if model == SCANNED else 4)
    parts = [t.cheapest(FIRST, many / 2), t.cheapest(MIDDLE, many / 2), t.cheapest(LAST, many / 2)]
    for split in parts:
        assert split.step_s(many / 2, 4) == pytest.approx(t.least_s(split.role, many / 2))
    # Separate parts may each choose their own layouts, so their sum is a lower bound.
    apart = t.least_s(MIDDLE, many) + t.least_s(FIRST, 0) + t.least_s(LAST, 0)
    whole = t.cheapest(ONLY, many).step_s(many, 4)
    assert whole == pytest.approx(t.least_s(ONLY, many))
    assert t.places.tied or apart <= whole * (1 + 1e-9)
