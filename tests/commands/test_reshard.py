"""``pase reshard``: two layouts on the command line."""

from __future__ import annotations

from tests.command import printed, reported


def test_reshard(layouts: tuple[str, str]) -> None:
    made = reported("reshard", *layouts)
    assert made["parameters"] == 1 and made["moved"] == len(made["moves"])
    assert sum(made["bytes"].values()) == sum(n for m in made["moves"] for n in m["bytes"].values())
    assert made["changes"] == ["devices: 8 -> 16", "mesh: model=8 -> model=16"]
    assert f"{made['moved']} of 1 parameters are resharded" in printed("reshard", *layouts)
    assert "0 of 1 parameters are resharded" in printed("reshard", layouts[0], layouts[0])
