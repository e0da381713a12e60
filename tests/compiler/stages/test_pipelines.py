"""``pipeline="auto"`` raises no error for any model of the zoo, and is never slower than the plan without stages."""

from __future__ import annotations

import pytest

import pase
from pase import zoo

MEET = "examples of the batch meet"
WITHOUT = dict.fromkeys(("densenet121", "inception_v3", "resnet101"), MEET)
"""The models without stages, and why: micro-batches would give other numbers."""


@pytest.mark.some(3)
@pytest.mark.parametrize("name", zoo.names())
def test_auto_is_never_slower_than_no_stages(name):
    m = zoo.reduced(name)
    asked = {"devices": 4, "machine": "v100x8", "max_axes": 1, "baselines": False, "work": 5.0}
    plain = pase.compile(m.loss_fn, m.params, m.batch, **asked)
    auto = pase.compile(m.loss_fn, m.params, m.batch, pipeline="auto", **asked)
    assert auto.cost <= plain.cost * (1 + 1e-9) and auto.bound <= auto.cost
    assert WITHOUT.get(name, "") in auto.skipped.get("stages", "")
    assert (name in WITHOUT) == ("stages" in auto.skipped)
