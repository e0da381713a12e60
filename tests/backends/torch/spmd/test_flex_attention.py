"""Attention with the user's own functions: the results are those of the unsharded step."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from tests.backends.torch.models import case
from tests.backends.torch.steps import assert_unsharded, one_step

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [(m, s) for m in ("flexes", "shares") for s in ("fsdp", "zero2", "ours@2x2", "random3@2x2")]
    + [("shares", "random1@2x2"), ("shares", "random2@2x2")],
)
def test_functions_of_flex_attention_are_given_places_in_the_whole(model: str, strategy: str) -> None:
    assert_unsharded(model, strategy)


def test_flex_attention_goes_around_no_ring() -> None:
    with pytest.raises(PaseError) as e:
        one_step(case("flexes", RANKS), "random1@2x2")
    assert "flex_attention" in e.value.where and "ring" in e.value.what
