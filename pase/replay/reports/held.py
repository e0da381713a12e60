"""Reports who holds a device's memory, beside a plan's account."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.pages.parts import bar, table
from pase.pages.shell import Section, page
from pase.replay.traces.memory_profile import DeviceMemory

__all__ = ["held_lines", "held_page", "held_report"]

_MOST = 12


def held_report(
    source: str, found: Sequence[DeviceMemory], account: Mapping[str, int] | None = None
) -> JsonObject:
    """Returns the devices with their holders; sizes in bytes. account: the plan's bytes of a device, by kind."""
    plan = None if account is None else {**account, "total": sum(account.values())}
    return {"source": source, "devices": [asdict(d) for d in found], "plan": plan}


def _headline(d: JsonObject) -> str:
    if not d["peak"]:
        return f"{d['device']}: {bytes_text(d['nbytes'])} held when the file was written"
    return (
        f"{d['device']}: {bytes_text(d['nbytes'])} at the peak of {d['events']} events, "
        f"{bytes_text(d['at_end_bytes'])} at their end"
    )


def _rest(plan: JsonObject, d: JsonObject) -> str:
    share = d["nbytes"] / plan["total"] if plan["total"] else 0.0
    return f"the plan's account of a device: {bytes_text(plan['total'])}; held here: {share:.0%} of it" + (
        "" if d["peak"] else ", at a moment that need not be the peak"
    )


def held_lines(report: JsonObject, most: int = _MOST) -> Iterator[str]:
    """Yields the lines of the report, in 80 columns. most: holders of a device."""
    for number, d in enumerate(report["devices"]):
        if number:
            yield ""
        yield _headline(d)
        if d["reserved_bytes"] >= 0:
            yield f"the allocator had reserved {bytes_text(d['reserved_bytes'])} when the file was written"
        if report["plan"] is not None:
            yield _rest(report["plan"], d)
        yield f"{'bytes':>10}{'share':>7}{'count':>7}  held by"
        for h in d["holders"][:most]:
            name = (h["where"] or "no line of the program") + (f" ({h['what']})" if h["what"] else "")
            yield f"{bytes_text(h['nbytes']):>10}{h['nbytes'] / d['nbytes']:7.1%}{h['count']:>7}  {name}"[:80]
        if len(d["holders"]) > most:
            rest = d["holders"][most:]
            yield f"{bytes_text(sum(h['nbytes'] for h in rest)):>10}{'':14}  {len(rest)} more (--json has them)"
    if report["plan"] is not None:
        yield ""
        yield "the plan's account"
        for kind, nbytes in report["plan"].items():
            yield f"{bytes_text(nbytes):>10}  {kind}"


def held_page(report: JsonObject) -> str:
    """Returns the report as an HTML page."""
    sections = [
        Section(
            anchor=f"device{i}",
            title=_headline(d),
            body=table(
                "Who holds the memory",
                ["held by", "kind", "allocations>", "bytes>", "|"],
                (
                    (
                        html.escape(h["where"] or "no line of the program"),
                        html.escape(h["what"]),
                        str(h["count"]),
                        bytes_text(h["nbytes"]),
                        bar([("compute", h["nbytes"])], d["holders"][0]["nbytes"]),
                    )
                    for h in d["holders"]
                ),
            ),
        )
        for i, d in enumerate(report["devices"])
    ]
    if report["plan"] is not None:
        rows = ((html.escape(k), bytes_text(n)) for k, n in report["plan"].items())
        sections.append(
            Section(
                anchor="plan",
                title="The plan's account of a device",
                body=table("Plan", ["kind", "bytes>"], rows),
            )
        )
    return page(
        title=f"Who holds the memory: {report['source']}",
        lead="",
        sections=sections,
        widgets=(),
        data={},
    )
