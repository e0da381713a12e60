"""Reports what collectives send and how long their ranks wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.replay.measurement.transfers import CollectiveCalls

__all__ = ["sent_lines", "transfers_report"]

_MOST = 8


def transfers_report(found: Sequence[CollectiveCalls], iterations: int) -> list[JsonObject]:
    """Returns a row for each collective. Times are in seconds, of the median call; calls are per iteration."""
    return [
        {
            "operation": x.operation,
            "bytes": x.nbytes if x.nbytes >= 0 else None,
            "group": x.group,
            "ways": x.ways or None,
            "traced": x.traced,
            "calls": x.calls / max(iterations, 1),
            "transfer_s": x.transfer_ns / 1e9,
            "whole": x.whole,
            "skew_s": None if x.skew_ns is None else x.skew_ns / 1e9,
            "last": [{"rank": r, "calls": n / max(iterations, 1)} for r, n in x.last.items()],
            "bus_bytes_per_s": x.bus_bytes_per_s,
            "link_bytes_per_s": x.link_bytes_per_s,
        }
        for x in found
    ]


def sent_lines(rows: Sequence[JsonObject], most: int = _MOST) -> Iterator[str]:
    """Yields the lines of the report, in 80 columns; nothing if there are no collectives."""
    if not rows:
        return
    yield (
        f"{'collective':<15}{'bytes':>10}{'ranks':>6}{'calls':>6}{'sends ms':>9}{'skew ms':>8}{'GB/s':>8}"
        f"{'link':>6}  last"
    )
    for r in rows[:most]:
        bound = "" if r["whole"] else "<"
        speed = r["bus_bytes_per_s"]
        rate = "" if speed is None else f"{'' if r['whole'] else '>'}{speed / 1e9:.1f}"
        link = "" if speed is None or not r["link_bytes_per_s"] else f"{speed / r['link_bytes_per_s']:.0%}"
        size = "" if r["bytes"] is None else bytes_text(r["bytes"])
        skew = "" if r["skew_s"] is None else f"{r['skew_s'] * 1e3:.3f}"
        last = f"{r['last'][0]['rank']} ({r['last'][0]['calls'] / r['calls']:.0%})" if r["last"] else ""
        yield (
            f"{r['operation'][:14]:<15}{size:>10}{r['ways'] or '':>6}{r['calls']:>6.3g}"
            f"{bound + format(r['transfer_s'] * 1e3, '.3f'):>9}{skew:>8}{rate:>8}{link:>6}  {last}"
        ).rstrip()
    if len(rows) > most:
        yield f"... and {len(rows) - most} more (--json has them)"
    if any(not r["whole"] for r in rows[:most]):
        yield "< and >: a rank of the group is not traced, so the time includes waiting for it"
