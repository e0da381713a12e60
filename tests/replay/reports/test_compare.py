"""Two traced runs compared, op by op."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.files.json_values import JsonObject
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.measurement.spending import Spending, spendings
from pase.replay.reports.compare import compare_spendings, compared_lines
from pase.replay.traces.ingest import load
from pase.replay.types import Timeline
from tests.needs import SHARED
from tests.replay.reports.test_advice import product, steps


def spent(t: Timeline) -> Spending:
    (found,) = spendings(measure(t))
    return found


def differences_sum(report: JsonObject) -> None:
    parts = [x["difference_s"] for x in (*report["kinds"], *report["idle"])]
    assert sum(parts) == pytest.approx(report["difference_s"], abs=1e-12)
    ops = sum(x["difference_s"] for x in report["ops"])
    assert ops == pytest.approx(sum(x["difference_s"] for x in report["kinds"]), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=5),
    st.lists(st.integers(1, 900), min_size=1, max_size=5),
)
def test_differences_add_up_to_that_of_the_step(before: list[int], after: list[int]) -> None:
    runs = [
        spent(steps({f"dot.{i}": (product(64 * (i + 1)), us) for i, us in enumerate(x)}))
        for x in (before, after)
    ]
    report = compare_spendings(*runs)
    differences_sum(report)
    assert report["difference_s"] == pytest.approx((sum(after) - sum(before)) / 1e6)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_run_does_not_differ_from_itself() -> None:
    s = spent(steps({"dot.1": (product(4096), 100), "dot.2": (product(4097), 300)}))
    report = compare_spendings(s, s)
    assert all(x["difference_s"] == 0 and not x["why"] for x in report["ops"])


def test_an_op_that_moved_to_another_line_is_the_same_op() -> None:
    before = steps({"dot.1": (product(4096), 100)})
    moved = {n: replace(op, source="model.py:99") for n, op in before.compiled.items()}
    (row,) = compare_spendings(spent(before), spent(replace(before, compiled=moved)))["ops"]
    assert (row["before_s"], row["difference_s"]) == (pytest.approx(1e-4), 0)


def test_what_changed_is_said() -> None:
    before = spent(steps({"dot.1": (product(4096, "f32"), 400)}))
    faster = spent(steps({"dot.1": (product(4096), 200)}))
    (row,) = compare_spendings(before, faster)["ops"]
    assert "product 32-bit became product bf16" in row["why"]
    a, b = product(4097), replace(product(4160), op_name=product(4097).op_name)
    (row,) = compare_spendings(spent(steps({"dot.1": (a, 400)})), spent(steps({"dot.1": (b, 200)})))["ops"]
    assert "4096x4096 . 4096x4097 became 4096x4096 . 4096x4160" in row["why"]


def test_ops_of_one_run_only_are_listed() -> None:
    before = spent(steps({"dot.1": (product(4096), 100)}))
    after = spent(steps({"dot.1": (product(4096), 100), "dot.2": (product(64), 50)}))
    rows = {x["shape"]: x for x in compare_spendings(before, after)["ops"]}
    assert rows["4096x4096 . 4096x64"]["why"] == ["only after"]
    assert rows["4096x4096 . 4096x64"]["before_s"] is None


@pytest.mark.data("measured/tracelens")
def test_one_model_on_two_cards() -> None:
    pair = [
        SHARED / f"measured/tracelens/tests__traces__{card}__Falconsai_nsfw_image_detection__1016002.json.gz"
        for card in ("h100", "mi300")
    ]
    report = compare_spendings(*(spent(align(load(p))) for p in pair))
    differences_sum(report)
    both = [x for x in report["ops"] if x["before_s"] is not None and x["after_s"] is not None]
    whole = sum(x["before_s"] or 0.0 for x in report["ops"])
    assert sum(x["before_s"] for x in both) > 0.99 * whole
    assert max(map(len, compared_lines(report))) <= 80
