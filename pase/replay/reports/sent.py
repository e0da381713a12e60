"""Reports what collectives send and how long their ranks wait for each other."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.pages.parts import table
from pase.replay.measurement.transfers import CollectiveCalls

__all__ = ["sent_lines", "sent_section", "transfers_report"]

_MOST = 8
_BOUNDS = "< and >: a rank of the group is not traced, so the time includes waiting for it"


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


def _cells(r: JsonObject) -> tuple[str, ...]:
    """What a row says, as text: bytes, ranks, calls, sends, skew, GB/s, share of the link, last."""
    bound, speed = "" if r["whole"] else "<", r["bus_bytes_per_s"]
    return (
        "" if r["bytes"] is None else bytes_text(r["bytes"]),
        f"{r['ways'] or ''}",
        f"{r['calls']:.3g}",
        f"{bound}{r['transfer_s'] * 1e3:.3f}",
        "" if r["skew_s"] is None else f"{r['skew_s'] * 1e3:.3f}",
        "" if speed is None else f"{'' if r['whole'] else '>'}{speed / 1e9:.1f}",
        "" if speed is None or not r["link_bytes_per_s"] else f"{speed / r['link_bytes_per_s']:.0%}",
        f"{r['last'][0]['rank']} ({r['last'][0]['calls'] / r['calls']:.0%})" if r["last"] else "",
    )


def sent_lines(rows: Sequence[JsonObject], most: int = _MOST) -> Iterator[str]:
    """Yields the lines of the report, in 80 columns; nothing if there are no collectives."""
    if not rows:
        return
    yield (
        f"{'collective':<15}{'bytes':>10}{'ranks':>6}{'calls':>6}{'sends ms':>9}{'skew ms':>8}{'GB/s':>8}"
        f"{'link':>6}  last"
    )
    for r in rows[:most]:
        size, ways, calls, sends, skew, rate, link, last = _cells(r)
        yield (
            f"{r['operation'][:14]:<15}{size:>10}{ways:>6}{calls:>6}{sends:>9}{skew:>8}{rate:>8}{link:>6}  {last}"
        ).rstrip()
    if len(rows) > most:
        yield f"... and {len(rows) - most} more (--json has them)"
    if any(not r["whole"] for r in rows[:most]):
        yield _BOUNDS


def sent_section(rows: Sequence[JsonObject]) -> str:
    """Returns the report as HTML."""
    head = ["collective", "bytes>", "ranks>", "calls>", "sends ms>", "skew ms>", "GB/s>", "link>", "last"]
    cells = ([html.escape(c) for c in (r["operation"], *_cells(r))] for r in rows)
    bounds = f"<p class='soft'>{html.escape(_BOUNDS)}</p>" if any(not r["whole"] for r in rows) else ""
    return table("What collectives send", head, cells) + bounds
