"""SVG charts without scripts: points under a roofline, and areas stacked over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["ChartLine", "Roof", "WorkPoint", "areas", "lines", "roofline"]

_WIDE, _HIGH = 960, 420
_LEFT, _BOTTOM, _TOP, _RIGHT = 78, 40, 24, 30
_NAMES = 190
"""The width at the right of a roofline for the names of its roofs, clear of its points."""


@dataclass(frozen=True, kw_only=True)
class WorkPoint:
    """A piece of work in a roofline chart.

    intensity: FLOPs per byte. rate: FLOPs per second. share: its fraction of the total time, shown as the point's area.
    title: the point's tooltip. node: the number of the page's node that it belongs to, for the page's scripts.
    """

    intensity: float
    rate: float
    share: float
    colour: str
    title: str
    node: int


@dataclass(frozen=True, kw_only=True)
class Roof:
    """A limit for work: ``rate`` FLOP/s, or what ``bandwidth`` bytes/s allow at the work's intensity."""

    name: str
    rate: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A line of a chart with logarithmic axes. points: (x, y), by x. dashed: drawn as an aim, not as a result."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def lines(drawn: Sequence[ChartLine], *, label: str, across: str, up: str) -> str:
    """A chart of lines with logarithmic axes; across in powers of two. Raises ValueError if there are no points.

    label: the chart's accessible name. across, up: what the axes show.
    """
    xs, ys = zip(*(p for line in drawn for p in line.points), strict=True)
    x0, x1 = math.log2(min(xs)), math.log2(max(xs))
    y0, y1 = math.log10(min(ys)), math.log10(max(ys))
    y0, y1 = y0 - 0.05 * (y1 - y0 or 1), y1 + 0.05 * (y1 - y0 or 1)

    def x(v: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * (math.log2(v) - x0) / ((x1 - x0) or 1)

    def y(v: float) -> float:
        return _HIGH - _BOTTOM - (_HIGH - _BOTTOM - _TOP) * (math.log10(v) - y0) / (y1 - y0)

    out = [_open(label)]
    for v in sorted(set(xs)):
        out.append(_rule(x(v), _TOP, x(v), _HIGH - _BOTTOM))
        out.append(f"<text x='{x(v):.1f}' y='{_HIGH - 22}' text-anchor='middle'>{v:,.0f}</text>")
    for power in range(math.floor(y0), math.ceil(y1) + 1):
        for v in (10.0**power * m for m in (1, 2, 5)):
            if y0 <= math.log10(v) <= y1:
                out.append(_rule(_LEFT, y(v), _WIDE - _RIGHT, y(v)))
                out.append(
                    f"<text x='{_LEFT - 6}' y='{y(v) + 4:.1f}' text-anchor='end'>{_engineering(v)}</text>"
                )
    out.append(f"<text x='{_WIDE / 2}' y='{_HIGH - 4}' text-anchor='middle'>{escape(across)}</text>")
    out.append(f"<text x='14' y='{_HIGH / 2}' transform='rotate(-90 14 {_HIGH / 2})'>{escape(up)}</text>")
    for line in drawn:
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
        dashes = " stroke-dasharray='5 5'" if line.dashed else ""
        title = f"<title>{escape(line.name)}</title>"
        out.append(f"<path class='line l-{line.colour}'{dashes} d='M{path}'>{title}</path>")
        for a, b in () if line.dashed else line.points:
            said = f"{escape(line.name)}: {a:,.0f}, {_engineering(b)}"
            dot = f"<circle class='f-{line.colour}' cx='{x(a):.1f}' cy='{y(b):.1f}' r='4.5'>"
            out.append(f"{dot}<title>{said}</title></circle>")
    return "".join([*out, _CLOSE])


def _decades(low: float, high: float) -> tuple[int, int]:
    """The powers of ten that enclose both numbers."""
    return math.floor(math.log10(low)), math.ceil(math.log10(high))


def _engineering(x: float) -> str:
    """The number with three digits and the prefix of its power of 1000.

    >>> _engineering(3.35e12), _engineering(1e15), _engineering(0.1)
    ('3.35 T', '1 P', '0.1')
    """
    for scale, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= scale:
            return f"{x / scale:.3g} {name}"
    return f"{x:.3g}"


def roofline(points: Sequence[WorkPoint], roofs: Sequence[Roof]) -> str:
    """A roofline chart with logarithmic axes. Raises ValueError if there are no points."""
    across = [p.intensity for p in points] + [r.rate / r.bandwidth for r in roofs]
    rates = [p.rate for p in points] + [r.rate for r in roofs]
    x0, x1 = _decades(min(across), max(across) * 1.5)
    y0, y1 = _decades(min(rates), max(rates))
    right = _WIDE - (_NAMES if roofs else _RIGHT)

    def x(v: float) -> float:
        return _LEFT + (right - _LEFT) * (math.log10(v) - x0) / max(x1 - x0, 1)

    def y(v: float) -> float:
        return _HIGH - _BOTTOM - (_HIGH - _BOTTOM - _TOP) * (math.log10(v) - y0) / max(y1 - y0, 1)

    out = [_open(f"Roofline of {len(points)} pieces of work")]
    for d in range(x0, x1 + 1):
        out.append(_rule(x(10.0**d), _TOP, x(10.0**d), _HIGH - _BOTTOM))
        out.append(f"<text x='{x(10.0**d):.1f}' y='{_HIGH - 22}' text-anchor='middle'>{10.0**d:g}</text>")
    for d in range(y0, y1 + 1):
        out.append(_rule(_LEFT, y(10.0**d), right, y(10.0**d)))
        out.append(
            f"<text x='{_LEFT - 6}' y='{y(10.0**d) + 4:.1f}' text-anchor='end'>{_engineering(10.0**d)}</text>"
        )
    middle = (_LEFT + right) / 2
    out.append(f"<text x='{middle}' y='{_HIGH - 4}' text-anchor='middle'>FLOP per byte moved</text>")
    out.append(f"<text x='14' y='{_HIGH / 2}' transform='rotate(-90 14 {_HIGH / 2})'>FLOP/s</text>")
    above = -math.inf
    for r in sorted(roofs, key=lambda r: -r.rate):
        knee, low = r.rate / r.bandwidth, max(10.0**x0, 10.0**y0 / r.bandwidth)
        line = f"M{x(low):.1f} {y(low * r.bandwidth):.1f}L{x(knee):.1f} {y(r.rate):.1f}H{right}"
        out.append(f"<path class='roof' d='{line}'><title>{escape(r.name)}</title></path>")
        above = max(y(r.rate) + 4, above + 14)
        out.append(f"<text x='{right + 6}' y='{above:.1f}'>{escape(r.name)}</text>")
    for p in sorted(points, key=lambda p: -p.share):
        size = 3.5 + 16 * math.sqrt(p.share)
        out.append(
            f"<circle class='dot f-{p.colour}' cx='{x(p.intensity):.1f}' cy='{y(p.rate):.1f}' r='{size:.1f}' "
            f"fill-opacity='.75' data-node='{p.node}'><title>{escape(p.title)}</title></circle>"
        )
    return "".join([*out, _CLOSE])


def areas(
    times: Sequence[float],
    layers: Sequence[tuple[str, str, Sequence[float]]],
    limits: Sequence[tuple[str, float]],
    *,
    label: str,
    value: str = "GiB",
    end: str = "",
) -> str:
    """A chart of areas that are stacked from the bottom up.

    times: the times, which must not decrease. layers: (name, colour, a value for each time). limits: (name, value) of
    horizontal lines. label: the chart's accessible name. value: the unit on the axis. end: the label of the last time.
    """
    most = max([*(sum(v[i] for *_, v in layers) for i in range(len(times))), *(v for _, v in limits)]) or 1.0
    whole = times[-1] or 1.0

    def x(t: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * t / whole

    def y(v: float) -> float:
        return _HIGH - _BOTTOM - (_HIGH - _BOTTOM - _TOP) * v / (most * 1.05)

    out = [_open(label)]
    step = _nice(most / 5)
    for k in range(int(most / step) + 1):
        out.append(_rule(_LEFT, y(k * step), _WIDE - _RIGHT, y(k * step)))
        out.append(
            f"<text x='{_LEFT - 6}' y='{y(k * step) + 4:.1f}' text-anchor='end'>{k * step:g} {value}</text>"
        )
    below = [0.0] * len(times)
    for name, colour, values in layers:
        above = [b + v for b, v in zip(below, values, strict=True)]
        top = "L".join(f"{x(t):.1f} {y(v):.1f}" for t, v in zip(times, above, strict=True))
        back = "L".join(f"{x(t):.1f} {y(v):.1f}" for t, v in reversed([*zip(times, below, strict=True)]))
        out.append(f"<path class='f-{colour}' d='M{top}L{back}Z'><title>{escape(name)}</title></path>")
        below = above
    for name, v in limits:
        out.append(f"<path class='limit' d='M{_LEFT} {y(v):.1f}H{_WIDE - _RIGHT}'/>")
        out.append(
            f"<text x='{_WIDE - _RIGHT - 4}' y='{y(v) + 15:.1f}' text-anchor='end'>{escape(name)}</text>"
        )
    out.append(f"<text x='{_LEFT}' y='{_HIGH - 18}'>start of the step</text>")
    out.append(f"<text x='{_WIDE - _RIGHT}' y='{_HIGH - 18}' text-anchor='end'>{escape(end)}</text>")
    return "".join([*out, _CLOSE])


def _nice(x: float) -> float:
    """The smallest number of the form 1, 2 or 5 times a power of ten that is at least x.

    >>> _nice(0.013), _nice(34)
    (0.02, 50.0)
    """
    base = 10.0 ** math.floor(math.log10(x))
    return next(base * k for k in (1, 2, 5, 10) if base * k >= x * (1 - 1e-9))


_CLOSE = "</svg></div>"


def _open(label: str) -> str:
    """The start of a chart, which scrolls on a narrow screen. label: its accessible name."""
    named = f"aria-label='{escape(label, quote=True)}'"
    svg = f"<svg class='chart' viewBox='0 0 {_WIDE} {_HIGH}' role='img' {named}>"
    return f"<div class='scroll' tabindex='0' role='region' {named}>{svg}"


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    """A line of the grid."""
    return f"<path class='grid' d='M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}'/>"
