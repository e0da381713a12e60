"""The page of ``pase scale`` has every point, a line for each machine, and names the fastest and the cheapest."""

from __future__ import annotations

from pathlib import Path

from tests.command import reported
from tests.pages.elements import Elements


def test_the_page_has_every_point(tmp_path: Path) -> None:
    """A billion tokens cost as many device-hours as they take, at their price; what does not fit is no best."""
    out = tmp_path / "page.html"
    prices = {"h100x8": 2.5, "v100x8": 0.5}
    stated = ",".join(f"{m}={p}" for m, p in prices.items())
    words = ("scale", "zoo:gpt2?batch=16&layers=1&seq=64", "--devices", "4,8", "--machine", ",".join(prices))
    points = reported(*words, "--price", stated, "-o", out)["points"]
    assert [(p["machine"], p["devices"]) for p in points] == [(m, n) for m in prices for n in (4, 8)]
    for p in points:
        hours = p["devices"] * 1e9 / p["tokens_per_s"] / 3600
        assert abs(p["device_hours_per_1e9_tokens"] / hours - 1) < 1e-9
        assert abs(p["cost_per_1e9_tokens"] / (hours * prices[p["machine"]]) - 1) < 1e-9
    text = out.read_text()
    drawn = Elements(text).found
    assert sum(t == "circle" for t, _ in drawn) == len(points)
    assert sum(t == "path" and (a.get("class") or "").startswith("line") for t, a in drawn) == 2 * len(prices)
    fastest = min(points, key=lambda p: p["cost"])
    assert f"Fastest: {fastest['devices']} devices of {fastest['machine']}" in text
    cheapest = min(points, key=lambda p: p["cost_per_1e9_tokens"])
    assert f"cheapest: {cheapest['devices']} devices of {cheapest['machine']}" in text
