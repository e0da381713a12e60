"""The parts of a stage add up to what the tables price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.compiler.stages.menu import FIRST, LAST, MIDDLE, ONLY
from tests.compiler.stages.staged import SCANNED, WRITTEN_OUT, tables_of


@pytest.mark.some(3)
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


@pytest.mark.parametrize("model", [SCANNED, WRITTEN_OUT])
def test_tables_made_from_others_are_as_if_made_by_themselves(model):
    """Whatever was computed from the first tables, none of it is found in those that were made from them."""
    first = tables_of(model, 4, "hoisted")

    def looked_at(t):
        return t.least_s(ONLY, 4.0), t.least_buffers(ONLY), t.cheapest(ONLY, 4.0).step_s(4.0, t.micro_batches)

    looked_at(first)
    shared = first.with_share(2)
    assert shared.features is first.features and shared.graph is first.graph
    made = {
        "each": first.sent_each(),
        "hoisted": shared,
        "gathered": first.sent_each().in_one_program(),
    }
    for weights, t in made.items():
        alone = replace(first, weights=weights, taken=t.taken)
        np.testing.assert_array_equal(looked_at(t), looked_at(alone), err_msg=weights)
