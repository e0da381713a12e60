"""The audits of communication and of XLA for TPU: their pages count right, and a compiler's message is read."""

from __future__ import annotations

import json

import pytest

from bench.audit import communication, communication_page, tpu, tpu_page


def row(model: str, strategy: str, compiled: int, devices: int | None = None) -> dict:
    out = {
        "model": model,
        "strategy": strategy,
        "mesh": [8],
        "collectives": {"all_gather": {"predicted": 100, "on_cpu": 100, "compiled": compiled}},
    }
    return out if devices is None else out | {"devices": devices}


def test_rows_stand_in_the_order_of_the_zoo() -> None:
    made = [
        row("gpt2", "fsdp", 90),
        row("mlp", "fsdp", 100, 32),
        row("mlp", "fsdp", 100),
        row("mlp", "data_parallel", 1),
    ]
    assert sorted(made, key=lambda r: communication.order("", r)) == [made[3], made[2], made[1], made[0]]


def test_the_summary_counts_by_method_and_devices() -> None:
    rows = [
        row("mlp", "fsdp", 100),
        row("gpt2", "fsdp", 125),
        row("gpt2", "fsdp", 100, 32),
        row("mlp", "ours@8", 100),
    ]
    cells = [(r, k, b) for r in rows for k, b in r["collectives"].items()]
    lines = communication_page.summary(cells)
    assert "| FSDP | 8 | 2 | 2 | 1 | 1 | 20.0% | 20.0% | 11.11% |" in lines
    assert "| FSDP | 32 | 1 | 1 | 1 | 1 | 0.0% | 0.0% | 0.00% |" in lines
    assert not any(line.startswith("| ours |") for line in lines)


def test_every_row_that_is_off_is_explained() -> None:
    """Of the committed results: an outlier without a cause is a finding, and fails."""
    rows = json.loads(communication.FILE.read_text())["rows"]
    off = [
        (r["model"], r["strategy"], r.get("devices", 8), kind)
        for r in rows
        for kind, b in r["collectives"].items()
        if (b["on_cpu"] or b["compiled"]) and abs(communication_page.error(b)) > communication_page.NOTED
    ]
    assert off
    assert [o for o in off if communication_page.reason(o[0], o[1], o[3]) == "not explained yet"] == []


@pytest.mark.parametrize(
    ("said", "gib"),
    [
        (
            "Ran out of memory in memory space hbm. Used 22.03G of 15.75G hbm. Exceeded by 6.28G.",
            (22.03, 15.75),
        ),
        (
            "the total memory required for HLO temporaries (66.36G) exceeds available HBM (15.75G).",
            (66.36, 15.75),
        ),
        ("something else", None),
    ],
)
def test_out_of_memory_is_read(said: str, gib: tuple[float, float] | None) -> None:
    read = tpu.out_of_memory(said)
    assert read == (None if gib is None else tuple(int(g * 2**30) for g in gib))


def test_ours_is_first_in_every_model_of_the_tpu_witness() -> None:
    """Of the strategies, all lowered by annotations."""
    lowered_by_hand = (tpu.MANUAL, tpu.AHEAD)
    rows = [r for r in json.loads(tpu.FILE.read_text())["rows"] if r["strategy"] not in lowered_by_hand]
    for model in tpu.MODELS:
        steps = {r["strategy"]: s for r in rows if r["model"] == model and (s := tpu_page.step_s(r))}
        assert min(steps, key=steps.__getitem__) == "ours", (model, steps)
