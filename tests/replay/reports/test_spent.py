"""The table of where the time goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.machine import load as load_machine
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import measure
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, spendings
from pase.replay.reports.spent import (
    loss_of,
    misaligned,
    shape_text,
    spending_report,
    spent_lines,
    spent_section,
)
from pase.replay.traces.ingest import load
from tests.needs import SHARED
from tests.replay.runs import measured

LOGITS = Origin(
    kind="product 32-bit",
    name="dot_general",
    where="model.py:67",
    product=((16384, 768), (768, 50257), (16384, 50257)),
    precision="32-bit",
    rows=(768, 50257),
    flops=2 * 16384 * 768 * 50257,
    nbytes=1,
)


def amount(**more: float) -> Amount:
    return Amount(
        **{"calls": 1, "kernels": 1, "clock_ns": 10**7, "busy_ns": 10**7, "floor_ns": 2.5e6, **more}
    )  # type: ignore[arg-type]


def test_shares_sum_to_one_and_the_report_is_json(tmp_path: Path) -> None:
    report = spending_report(spendings(measured(tmp_path, simulate(ImaginedRun(ranks=2, noise=0.05)))))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    page = spent_section(report[0], most=1)
    assert all(k["kind"] in page for k in report[0]["kinds"]) and "that take less" in page
    for r in report:
        assert sum(x["share"] for x in (*r["kinds"], *r["idle"])) == pytest.approx(1)
        assert sum(x["seconds"] for x in (*r["kinds"], *r["idle"])) == pytest.approx(r["step_s"])
        assert sum(x["seconds"] for x in r["ops"]) == pytest.approx(sum(x["seconds"] for x in r["kinds"]))


def test_ops_lie_under_the_card_s_limits(tmp_path: Path) -> None:
    report = spending_report(spendings(measured(tmp_path, simulate(ImaginedRun(ranks=1)))))[0]
    assert report["roofs"] == [] and "class='dot" not in spent_section(report)  # an unknown card, no FLOPs
    op = {
        **report["ops"][0],
        "name": "<dot>",
        "kind": "product bf16",
        "flops_per_s": 4e14,
        "bytes_per_s": 1e12,
    }
    roofs = [{"precision": "bf16", "flops_per_s": 9.89e14, "bytes_per_s": 3.35e12}]
    drawn = spent_section({**report, "ops": [op, *report["ops"][1:]], "roofs": roofs})
    assert drawn.count("class='dot") == 1 and "bf16, 989 TFLOP/s" in drawn and "&lt;dot&gt;" in drawn
    assert "<dot>" not in drawn and "400.0 TFLOP/s" in drawn and drawn.count("data-searched") == 1


@pytest.mark.data("gpu_h100/traces/mlp.xplane.pb.gz")
def test_a_recorded_run_has_the_limits_of_its_precisions() -> None:
    t = load(SHARED / "gpu_h100" / "traces" / "mlp.xplane.pb.gz")
    (report,) = spending_report(spendings(measure(align(t))))
    peaks = load_machine("h100x8").device.peak_flops
    assert report["roofs"] and all(r["flops_per_s"] in peaks.values() for r in report["roofs"])
    for o in report["ops"]:
        if o["flops_per_s"] and o["kind"].startswith("product"):
            assert o["flops_per_s"] <= max(peaks.values()) * 1.02


def test_reasons_for_a_loss() -> None:
    device = load_machine("h100x8").device
    assert misaligned(LOGITS) == (50257,)
    assert loss_of(LOGITS, amount(), device) == "rows of 50257 are not aligned, float32"
    light = Origin(kind="norm", name="reduce", nbytes=10**7)
    assert loss_of(light, amount(calls=2000), device) == "small"
    assert loss_of(light, amount(), device) == "25% of the card's memory"
    assert loss_of(Origin(kind="copy", name="aten::cudnn_convolution"), amount(), None) == "layout copy"
    assert loss_of(Origin(kind="other", name="x"), amount(floor_ns=-1.0), None) == ""


def test_shapes_in_a_line() -> None:
    assert shape_text(LOGITS) == "16384x768 . 768x50257"
    assert (
        shape_text(Origin(kind="norm", name="", operands=((2, 3), (), (4,), (5,), (6,)))) == "2x3, 4, 5, ..."
    )


@pytest.mark.data("gpu_h100/traces")
def test_a_real_profile_on_a_screen() -> None:
    m = measure(align(load(SHARED / "gpu_h100/traces/gpt2_batch_16.xplane.pb.gz")))
    (report,) = spending_report(spendings(m))
    lines = list(spent_lines(report))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "transformers.py:67" in text and "50257" in text and "H100" in text
    # Its three products with the vocabulary take 21 of 62 ms.
    logits = [o for o in report["ops"] if "50257" in o["shape"] and o["kind"].startswith("product")]
    assert sum(o["seconds"] for o in logits) == pytest.approx(21e-3, rel=0.01)
    assert all(k["of_peak"] is None or k["of_peak"] < 1 for k in report["kinds"])
