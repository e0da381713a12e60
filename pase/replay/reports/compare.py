"""Compares where the time of two traced runs goes, op by op: two cards, before and after a change, two ranks."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pase.files.json_values import JsonObject
from pase.replay.measurement.breakdown import CAUSES
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, Spending, peak_flops
from pase.replay.reports.spent import placed, shape_text
from pase.replay.types import Shapes

__all__ = ["compare_spendings", "compared_lines"]

_LINE = re.compile(r":\d+")
_LIBRARY = re.compile(r"(?<=aten::)(cudnn|miopen|mkldnn|mps|thnn)_")
"""PyTorch has one op for each library that runs it."""
_SAME = 0.02
"""Differences below this fraction are not explained."""
_COLUMNS = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class _Side:
    """The ops of one run that have one name, place and shape."""

    spent: Spending
    ops: list[tuple[Origin, Amount]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(a.clock_ns for _, a in self.ops) / len(self.spent.iterations) / 1e9

    @property
    def calls(self) -> float:
        return sum(a.calls for _, a in self.ops) / len(self.spent.iterations)

    @property
    def main(self) -> Origin:
        return max(self.ops, key=lambda x: x[1].busy_ns)[0]

    @property
    def floor_s(self) -> float | None:
        known = [a.floor_ns for _, a in self.ops if a.floor_ns >= 0]
        return sum(known) / len(self.spent.iterations) / 1e9 if known else None


_Key = tuple[str, str, Shapes]


def compare_spendings(before: Spending, after: Spending) -> JsonObject:
    """Returns the differences between two runs, in seconds of the mean iteration.

    The differences of all ops and of idle time add up to that of the iterations. Ops are matched by their name, module
    (or file and function) and operand shapes; then, if the shapes differ, by name and module. Ops of one run only are
    listed with None for the other.
    """
    a, b = _groups(before), _groups(after)
    rows = []
    for left, right in _matched(a, b):
        rows.append(_row(a.get(left) if left else None, b.get(right) if right else None))
    rows.sort(key=lambda r: -abs(r["difference_s"]))
    works = [_works(s) for s in (before, after)]
    idle = sorted({*before.idle, *after.idle})
    return {
        "before": _whole(before),
        "after": _whole(after),
        "difference_s": _step(after) - _step(before),
        "kinds": [
            {"kind": k} | _times(_per_step(before, works[0].get(k, 0)), _per_step(after, works[1].get(k, 0)))
            for k in sorted({*works[0], *works[1]})
        ],
        "idle": [
            {"cause": c, "in_words": CAUSES.get(c, "computing on the CPU")}
            | _times(_per_step(before, before.idle.get(c, 0)), _per_step(after, after.idle.get(c, 0)))
            for c in idle
        ],
        "ops": rows,
    }


def _step(s: Spending) -> float:
    return _per_step(s, s.total_ns)


def _per_step(s: Spending, ns: int) -> float:
    return ns / len(s.iterations) / 1e9


def _works(s: Spending) -> dict[str, int]:
    """Returns the ns of each kind of work, whatever its precision, which the names of kernels do not always tell."""
    out: defaultdict[str, int] = defaultdict(int)
    for o, a in s.ops.items():
        out[o.kind.removesuffix(f" {o.precision}") if o.precision else o.kind] += a.clock_ns
    return dict(out)


def _whole(s: Spending) -> JsonObject:
    return {"rank": s.rank, "step_s": _step(s), "device": s.device_name}


def _times(before: float, after: float) -> JsonObject:
    return {"before_s": before, "after_s": after, "difference_s": after - before}


def _groups(s: Spending) -> dict[_Key, _Side]:
    out: dict[_Key, _Side] = {}
    for o, a in s.ops.items():
        # A changed line number is not a changed op.
        key = (_LIBRARY.sub("", o.name), _LINE.sub("", o.where), o.product or o.operands)
        out.setdefault(key, _Side(spent=s)).ops.append((o, a))
    return out


def _matched(a: dict[_Key, _Side], b: dict[_Key, _Side]) -> Iterator[tuple[_Key | None, _Key | None]]:
    """Yields pairs of ops, and then those of one run only."""
    left, right = [k for k in a if k not in b], [k for k in b if k not in a]
    yield from ((k, k) for k in a if k in b)
    for depth in (2, 1):
        # With another shape, the op of the same name and module that takes longest is the same op.
        names: defaultdict[tuple[object, ...], list[_Key]] = defaultdict(list)
        for k in sorted(right, key=lambda k: -b[k].seconds):
            names[k[:depth]].append(k)
        paired: set[_Key] = set()
        for k in sorted(left, key=lambda k: -a[k].seconds):
            if names[k[:depth]]:
                other = names[k[:depth]].pop(0)
                paired |= {k}
                right.remove(other)
                yield k, other
        left = [k for k in left if k not in paired]
    yield from ((k, None) for k in left)
    yield from ((None, k) for k in right)


def _row(a: _Side | None, b: _Side | None) -> JsonObject:
    either = b if b is not None else a
    assert either is not None
    o = either.main
    return {
        "name": o.name,
        "where": o.where,
        "kind": o.kind,
        "shape": shape_text(o),
        "before_s": a.seconds if a is not None else None,
        "after_s": b.seconds if b is not None else None,
        "difference_s": (b.seconds if b is not None else 0.0) - (a.seconds if a is not None else 0.0),
        "why": _why(a, b),
    }


def _why(a: _Side | None, b: _Side | None) -> list[str]:
    """Returns in words what differs between an op's two runs."""
    if a is None or b is None:
        return ["only after" if a is None else "only before"]
    if abs(b.seconds - a.seconds) <= _SAME * max(a.seconds, b.seconds):
        return []
    x, y = a.main, b.main
    out = []
    if x.kind != y.kind and not _same_work(x, y):
        out.append(f"{x.kind} became {y.kind}")
    if (x.product or x.operands) != (y.product or y.operands):
        out.append(f"{shape_text(x)} became {shape_text(y)}")
    if round(a.calls) != round(b.calls):
        out.append(f"{a.calls:.0f} calls became {b.calls:.0f}")
    if len(a.ops) == len(b.ops) == 1 and a.calls and b.calls:
        count = [amount.kernels / amount.calls for _, amount in (a.ops[0], b.ops[0]) if amount.calls]
        if len(count) == 2 and round(count[0], 1) != round(count[1], 1):
            out.append(f"{count[0]:.3g} kernels a call became {count[1]:.3g}")
    if a.spent.device is not b.spent.device and a.spent.device is not None and b.spent.device is not None:
        rates = [peak_flops(s.spent.device, s.main.precision) for s in (a, b) if s.spent.device is not None]
        if x.flops > 0 and all(rates):
            out.append(f"the cards' rates: x{(rates[1] or 0.0) / (rates[0] or 1.0):.2f}")
        elif x.flops == 0:
            memory = [
                s.spent.device.memory_bandwidth_bytes_per_s for s in (a, b) if s.spent.device is not None
            ]
            out.append(f"the cards' memory: x{memory[1] / memory[0]:.2f}")
    if a.floor_s and b.floor_s and a.seconds and b.seconds:
        reached = [min(s.floor_s / s.seconds, 1.0) for s in (a, b) if s.floor_s]
        if abs(reached[1] - reached[0]) >= _SAME:
            out.append(f"{reached[0]:.0%} of the card's rate became {reached[1]:.0%}")
    return out


_OF_BITS = {"16-bit": ("bf16", "fp16"), "8-bit": ("fp8", "int8")}


def _same_work(x: Origin, y: Origin) -> bool:
    """Whether two ops may do the same work: the names of some kernels do not say which precision of so many bits it
    is."""
    both = {x.precision, y.precision}
    alike = any(bits in both and both <= {bits, *named} for bits, named in _OF_BITS.items())
    unknown = not (x.precision and y.precision)
    return x.kind.split(" ")[0] == y.kind.split(" ")[0] and (alike or unknown)


def compared_lines(report: JsonObject, most: int = 15) -> Iterator[str]:
    """Yields the lines of a comparison, in 80 columns. ``most``: the number of ops."""
    before, after = report["before"], report["after"]
    for word, x in (("before", before), ("after", after)):
        yield f"{word:7}rank {x['rank']}, {x['step_s'] * 1e3:.2f} ms a step {x['device']}".rstrip()[:_COLUMNS]
    yield f"{'':34}{'before ms':>10}{'after ms':>10}{'difference':>12}"
    parts = [(k["kind"], k) for k in report["kinds"]] + [
        (f"idle: {i['cause']}" if i["cause"] in CAUSES else i["in_words"], i) for i in report["idle"]
    ]
    for name, x in sorted(parts, key=lambda p: -abs(p[1]["difference_s"])):
        yield f"{name[:33]:34}{_ms(x['before_s']):>10}{_ms(x['after_s']):>10}{x['difference_s'] * 1e3:+12.3f}"
    whole = {"before_s": before["step_s"], "after_s": after["step_s"]}
    yield (
        f"{'a step':34}{_ms(whole['before_s']):>10}{_ms(whole['after_s']):>10}{report['difference_s'] * 1e3:+12.3f}"
    )
    yield ""
    yield f"{'before ms':>10}{'after ms':>10}{'difference':>12}  the ops that differ most"
    for o in report["ops"][:most]:
        name = placed(o["name"], o["where"], _COLUMNS - 34)
        yield f"{_ms(o['before_s']):>10}{_ms(o['after_s']):>10}{o['difference_s'] * 1e3:+12.3f}  {name}"
        for text in (f"{o['kind']}; {o['shape']}".rstrip("; "), "; ".join(o["why"])):
            yield from (f"{'':34}{line}" for line in textwrap.wrap(text, _COLUMNS - 34))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
