"""Reports where the time of an iteration goes: by kind of work, and op by op, beside the card's rates."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from pase.files.json_values import JsonObject
from pase.machine.types import Device
from pase.pages.charts import Roof, WorkPoint, roofline
from pase.pages.parts import bar, key, table
from pase.replay.kernels import SINGLE, work_of
from pase.replay.measurement.breakdown import CAUSES
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, Spending, peak_flops
from pase.replay.types import CPU

__all__ = [
    "aligned_to",
    "loss_of",
    "misaligned",
    "number_text",
    "placed",
    "shape_text",
    "spending_report",
    "spent_lines",
    "spent_section",
]

_WIDTH = {
    "bf16": 2,
    "fp16": 2,
    "16-bit": 2,
    **dict.fromkeys(SINGLE, 4),
    "fp8": 1,
    "int8": 1,
    "8-bit": 1,
    "fp64": 8,
}
_ROW = 16
"""Bytes to which matrix units want the rows of factors and results aligned (cuBLAS, tensor cores)."""
_SMALL_NS = 10_000.0
_COLUMNS = 80
_HIDDEN = 1.2
"""Kinds whose ops run this much longer than what is attributed to them run beside others; that is then shown, too."""


def spending_report(spent: Sequence[Spending]) -> list[JsonObject]:
    """Returns for each rank the parts of its mean iteration, in seconds. Kinds and idle causes add up to it."""
    return [_rank(s) for s in spent]


def _rank(s: Spending) -> JsonObject:
    n = len(s.iterations)
    device = s.device
    reached = [
        a.flops / peak
        for o, a in s.ops.items()
        if device is not None and a.flops and (peak := peak_flops(device, o.precision))
    ]
    idle = sum(s.idle.values())
    return {
        "rank": s.rank,
        "step_s": s.total_ns / n / 1e9,
        "device": s.device_name,
        "rates_from": device.name if device is not None else None,
        "peak_utilization": math.fsum(reached) / (s.total_ns / 1e9) if reached and s.total_ns else None,
        "idle_s": idle / n / 1e9,
        "roofs": _roofs(s),
        "kinds": [_amount(a, s, kind) | {"kind": kind} for kind, a in s.kinds.items()],
        "idle": [
            {
                "cause": c,
                "in_words": CAUSES.get(c, "computing on the CPU"),
                "seconds": ns / n / 1e9,
                "share": ns / s.total_ns if s.total_ns else 0.0,
            }
            for c, ns in sorted(s.idle.items(), key=lambda x: -x[1])
        ],
        "ops": [_op(o, a, s) for o, a in s.ops.items()],
    }


def _roofs(s: Spending) -> list[JsonObject]:
    """Returns the card's limits for the precisions of the run's products: FLOP/s, and bytes/s of its memory."""
    device = s.device
    if device is None:
        return []
    precisions = dict.fromkeys(o.precision for o, a in s.ops.items() if a.flops and o.precision)
    return [
        {"precision": p, "flops_per_s": peak, "bytes_per_s": device.memory_bandwidth_bytes_per_s}
        for p in precisions
        if (peak := peak_flops(device, p))
    ]


def _amount(a: Amount, s: Spending, kind: str) -> JsonObject:
    n, device = len(s.iterations), s.device
    flops = a.flops / a.timed_ns * 1e9 if a.timed_ns else None
    moved = a.nbytes / a.moved_ns * 1e9 if a.moved_ns else None
    peak = peak_flops(device, kind.rpartition(" ")[2]) if device is not None else None
    return {
        "calls": a.calls / n,
        "seconds": a.clock_ns / n / 1e9,
        "share": a.clock_ns / s.total_ns if s.total_ns else 0.0,
        "busy_s": a.busy_ns / n / 1e9,
        "flops_per_s": flops,
        "of_peak": flops / peak if flops and peak else None,
        "bytes_per_s": moved,
        "of_memory": moved / device.memory_bandwidth_bytes_per_s if moved and device is not None else None,
        "floor_s": a.floor_ns / n / 1e9 if a.floor_ns >= 0 else None,
    }


def _op(o: Origin, a: Amount, s: Spending) -> JsonObject:
    row = _amount(a, s, o.kind)
    floor = row["floor_s"]
    return {
        "name": o.name,
        "where": o.where,
        "kind": o.kind,
        "shape": shape_text(o),
        **row,
        "lost_s": None if floor is None else max(row["seconds"] - floor, 0.0),
        "why": loss_of(o, a, s.device, s.device_name),
    }


def shape_text(o: Origin) -> str:
    """Returns the shapes of an op in a line: "(a × b) · (b × c)" for a product, else those of its operands."""
    if o.product:
        return " . ".join(_dims(x) for x in o.product[:2])
    shown = [x for x in o.operands if x]
    return ", ".join(_dims(x) for x in shown[:3]) + (", ..." if len(shown) > 3 else "")


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def misaligned(o: Origin) -> tuple[int, ...]:
    """Returns the sizes of a product's dims whose rows are no multiple of 16 bytes; empty if there are none.

    >>> misaligned(Origin(kind="product bf16", name="", precision="bf16", rows=(64, 50257)))
    (50257,)
    """
    width = _WIDTH.get(o.precision, 0)
    return tuple(d for d in o.rows if width and d > _ROW and d * width % _ROW)


def aligned_to(size: int, precision: str) -> int:
    """Returns the least size of a dim whose rows are aligned, from ``size`` on.

    >>> aligned_to(50257, "bf16"), aligned_to(50257, "tf32"), aligned_to(647, "fp16")
    (50264, 50260, 648)
    """
    row = max(_ROW // _WIDTH[precision], 1)
    return -(-size // row) * row


def loss_of(o: Origin, a: Amount, device: Device | None, name: str = "") -> str:
    """Returns in words why an op takes longer than the card's rates allow; "" if nothing is known.

    name: the device's name. Matrix units run 16 bits faster; a CPU need not.
    """
    why = []
    if odd := misaligned(o):
        why.append(f"rows of {', '.join(map(str, odd))} are not aligned")
    if o.precision in SINGLE and o.flops > 0 and name != CPU:
        why.append("float32")
    if a.calls and a.busy_ns / a.calls < _SMALL_NS:
        why.append("small")
    if o.kind == "copy":
        why.append("layout copy" if work_of(o.name) == "convolution" else "only moves data")
    if not why and a.floor_ns > 0 and a.clock_ns:
        bound = "memory"
        if device is not None and o.flops > 0 and (peak := peak_flops(device, o.precision)):
            bound = "compute" if o.flops / peak > o.nbytes / device.memory_bandwidth_bytes_per_s else bound
        why.append(f"{min(a.floor_ns / a.busy_ns, 1.0) if a.busy_ns else 0.0:.0%} of the card's {bound}")
    return ", ".join(why)


def spent_lines(report: JsonObject, most: int = 10) -> Iterator[str]:
    """Yields the lines of a rank's report, in 80 columns. ``most``: the number of ops."""
    card = f" on {report['device']}" if report["device"] else ""
    yield f"where the time goes: rank {report['rank']}, {report['step_s'] * 1e3:.2f} ms a step{card}"[
        :_COLUMNS
    ]
    yield f"{'':27}{'ms':>9}{'share':>7}{'ops':>7}{'TFLOP/s':>9}{'peak':>6}{'GB/s':>8}{'mem':>6}"
    for k in report["kinds"]:
        yield (
            f"{k['kind'][:26]:27}{k['seconds'] * 1e3:9.3f}{k['share']:7.1%}{k['calls']:7.0f}"
            f"{number_text(k['flops_per_s'], 1e12, 1):>9}{_share(k['of_peak']):>6}"
            f"{number_text(k['bytes_per_s'], 1e9, 0):>8}{_share(k['of_memory']):>6}"
        ).rstrip() + (f"  {k['busy_s'] * 1e3:.3f} ms in all" if k["busy_s"] > _HIDDEN * k["seconds"] else "")
    for i in report["idle"]:
        name = f"idle: {i['cause']}" if i["cause"] in CAUSES else i["in_words"]
        yield f"{name[:26]:27}{i['seconds'] * 1e3:9.3f}{i['share']:7.1%}"
    if report["device"] != CPU and any(k["kind"].endswith("32-bit") for k in report["kinds"]):
        yield "32-bit: float32 operands; the trace does not say whether products use TF32"
    if report["peak_utilization"] is not None:
        yield f"{report['peak_utilization']:.1%} of the step is what its products take at the card's peak rate"
    elif report["device"] and report["rates_from"] is None:
        yield f"no machine file has the rates of {report['device']}"[:_COLUMNS]
    shown = report["ops"][:most]
    if shown:
        yield ""
        yield f"{'ms':>8}{'share':>7}{'calls':>6}{'floor':>8}  the ops that take longest"
    for o in shown:
        floor = f"{o['floor_s'] * 1e3:8.3f}" if o["floor_s"] is not None else f"{'':8}"
        name = placed(o["name"], o["where"], 49)
        yield f"{o['seconds'] * 1e3:8.3f}{o['share']:7.1%}{o['calls']:6.3g}{floor}  {name}"
        more = [x for x in (o["kind"], o["shape"], o["why"]) if x]
        lines = ["; ".join(more)] if len("; ".join(more)) <= 49 else ["; ".join(more[:-1]), more[-1]]
        for line in lines:
            yield f"{'':31}{_cut(line, 49)}"


def spent_section(report: JsonObject, most: int = 1000) -> str:
    """Returns a rank's report as HTML: kinds of work and causes of idling as bars, then the ops. most: ops."""
    parts = [
        (
            k["kind"],
            "compute",
            k["seconds"],
            number_text(k["flops_per_s"], 1e12, 1),
            number_text(k["bytes_per_s"], 1e9, 0),
        )
        for k in report["kinds"]
    ]
    parts += [
        (i["in_words"], "other" if i["cause"] in CAUSES else "compute", i["seconds"], "", "")
        for i in report["idle"]
    ]
    longest = max((seconds for _, _, seconds, _, _ in parts), default=0.0)
    kinds = (
        (
            html.escape(kind),
            f"{seconds * 1e3:.3f}",
            f"{seconds / report['step_s'] if report['step_s'] else 0:.1%}",
            bar([(colour, seconds)], longest),
            flops,
            moved,
        )
        for kind, colour, seconds, flops, moved in parts
    )
    ops = (
        (
            f"{o['seconds'] * 1e3:.3f}",
            "" if o["floor_s"] is None else f"{o['floor_s'] * 1e3:.3f}",
            "" if o["lost_s"] is None else f"{o['lost_s'] * 1e3:.3f}",
            f"{o['calls']:.3g}",
            html.escape(o["name"] + (f", {o['where']}" if o["where"] else "")),
            html.escape(o["kind"]),
            html.escape(o["why"]),
            html.escape(o["shape"]),
        )
        for o in report["ops"][:most]
    )
    left = len(report["ops"]) - most
    return (
        table("Kinds of work", ["kind", "ms>", "share>", "|", "TFLOP/s>", "GB/s>"], kinds)
        + _roofline(report)
        + table(
            "The ops that take longest",
            ["ms>", "floor ms>", "lost ms>", "calls>", "op", "kind", "why", "shape"],
            ops,
            searched=True,
        )
        + (f"<p class='soft'>{left} ops that take less are in --json.</p>" if left > 0 else "")
    )


_COLOURS = {"product": "compute", "convolution": "update", "attention": "backward"}


def _roofline(report: JsonObject) -> str:
    """Returns the ops with FLOPs under the card's limits; "" if there are none."""
    points = [
        WorkPoint(
            intensity=o["flops_per_s"] / o["bytes_per_s"],
            rate=o["flops_per_s"],
            share=o["share"],
            colour=_COLOURS.get(o["kind"].partition(" ")[0], "other"),
            title=f"{o['name']}, {o['where']}: {o['kind']}, {o['shape']}, {o['seconds'] * 1e3:.3f} ms, "
            f"{o['flops_per_s'] / 1e12:.1f} TFLOP/s",
            node=k,
        )
        for k, o in enumerate(report["ops"])
        if o["flops_per_s"] and o["bytes_per_s"] and o["seconds"]
    ]
    if not points:
        return ""
    roofs = [
        Roof(
            name=f"{r['precision']}, {r['flops_per_s'] / 1e12:.0f} TFLOP/s",
            rate=r["flops_per_s"],
            bandwidth=r["bytes_per_s"],
        )
        for r in report["roofs"]
    ]
    return (
        "<p>Each point is an op with FLOPs; its area is its share of the step. The lines are the card's limits: its "
        "memory on the left, its peak rates on the right. How far a point lies below them is what the op loses.</p>"
        + key((c, k) for k, c in _COLOURS.items() if any(p.colour == c for p in points))
        + roofline(points, roofs)
    )


def placed(name: str, where: str, columns: int) -> str:
    """Returns an op's name and place in so many columns. Of nested modules, the inner ones say more.

    >>> placed("dot_general", "block.MultiHeadDotProductAttention.query, linear.py:199", 49)
    'dot_general, query, linear.py:199'
    >>> placed("aten::mm", "", 49), placed("aten::addmm", "Linear", 10)
    ('aten::mm', 'aten::a...')
    >>> placed("transpose, backward", "a_long_file_of_the_user.py:199", 40)
    'transpose, backward, a_long_file_of_t...'
    """
    modules, comma, line = where.partition(", ")
    while len(f"{name}, {modules}{comma}{line}") > columns and "." in modules and ".py" not in modules:
        modules = modules.partition(".")[2]
    return _cut(", ".join(x for x in (name, modules, line) if x), columns)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 3] + "..."


def number_text(x: float | None, unit: float, digits: int) -> str:
    """Returns a figure in its unit with so many decimals; a small one with two digits that count.

    >>> number_text(7.3e9, 1e12, 0), number_text(820e12, 1e12, 0), number_text(None, 1.0, 0)
    ('0.0073', '820', '')
    """
    if x is None:
        return ""
    return f"{x / unit:.2g}" if 0 < x / unit < 10**-digits else f"{x / unit:.{digits}f}"


def _share(x: float | None) -> str:
    return "" if x is None else f"{x:.0%}"
