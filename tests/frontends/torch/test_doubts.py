"""Why a gradient may differ from the slope of its loss."""

from __future__ import annotations

import pytest

from pase.frontends.torch.doubts import doubts
from tests.backends.torch.checked import given

pytestmark = pytest.mark.torch


def test_doubts_lie_between_a_parameter_and_the_loss() -> None:
    _, _, case = given()
    found = doubts(case.traced)
    assert {"enc.weight", "head.bias"} <= set(found) and "unused" not in found
    assert "a value without a gradient at" in found["enc.weight"] and "checked.py" in found["enc.weight"]
