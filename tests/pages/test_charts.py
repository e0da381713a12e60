"""Charts are drawn to scale, and are well-formed."""

from __future__ import annotations

import re

import pytest

from pase.pages.charts import Roof, WorkPoint, areas, roofline
from tests.pages.elements import Elements


def test_charts_are_drawn() -> None:
    point = WorkPoint(intensity=10.0, rate=1e12, share=0.5, colour="compute", title="a & b", node=3)
    drawn = roofline([point], [Roof(name="peak", rate=1e13, bandwidth=1e12)])
    assert (
        [tag for tag, _ in Elements(drawn).found[:2]] == ["div", "svg"]
        and "a &amp; b" in drawn
        and "data-node='3'" in drawn
    )
    stacked = areas([0.0, 1.0], [("x", "compute", [1.0, 2.0])], [("limit", 3.0)], label="l")
    assert Elements(stacked).found[0][1]["aria-label"] == "l"


def test_points_lie_where_their_rate_and_intensity_say() -> None:
    """On logarithmic axes, a decade has one length; the knee of a roof is at peak / bandwidth."""
    points = [
        WorkPoint(intensity=10.0**k, rate=10.0 ** (k + 9), share=0.1, colour="compute", title=str(k), node=k)
        for k in range(3)
    ]
    drawn = roofline(points, [Roof(name="peak", rate=1e11, bandwidth=1e9)])
    dots = [tuple(map(float, c)) for c in re.findall(r"cx='([\d.]+)' cy='([\d.]+)'", drawn)]
    (right, up) = (dots[1][0] - dots[0][0], dots[0][1] - dots[1][1])
    assert right > 0 and dots[2][0] - dots[1][0] == pytest.approx(right, abs=0.2)
    assert up > 0 and dots[1][1] - dots[2][1] == pytest.approx(up, abs=0.2)
    knee = re.search(r"class='roof' d='M.*?L([\d.]+) ([\d.]+)H", drawn)
    assert knee is not None and tuple(map(float, knee.groups())) == dots[2]


def test_areas_are_stacked() -> None:
    """The second layer begins where the first ends."""
    drawn = areas([0.0, 2.0], [("x", "a", [1.0, 1.0]), ("y", "b", [2.0, 4.0])], [], label="l")
    below, above = (
        re.findall(r"[ML]([\d.]+) ([\d.]+)", d) for d in re.findall(r"class='f-\w' d='([^']+)'", drawn)
    )
    assert below[:2] == above[:1:-1]
    heights = [float(below[2][1]) - float(below[0][1]), float(above[3][1]) - float(above[0][1])]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.3)
