"""Data for the timeline widget: streams of boxes in nanoseconds. The boxes of a stream do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pase.files.json_values import JsonObject

__all__ = ["StreamBox", "drawn_streams", "timeline_mount"]


@dataclass(frozen=True, kw_only=True)
class StreamBox:
    """Something that ran on a stream. kind: index into the timeline's kinds. more: text shown if it is selected."""

    label: str
    kind: int
    start_ns: int
    length_ns: int
    more: str = ""


def drawn_streams(
    title: str,
    streams: Mapping[str, Iterable[StreamBox]],
    kinds: Sequence[tuple[str, str]],
    *,
    end_ns: int,
    hint: str,
    narrow: int = 46,
) -> JsonObject:
    """The JSON of a timeline for the widget. Each label is stored once.

    streams: name -> boxes. kinds: (name, colour of the style sheet). end_ns: the end of the timeline. hint: a line of
    help. narrow: the smallest width in pixels at which a box shows its label.
    """
    labels: dict[str, int] = {}
    more: dict[str, int] = {}
    rows = []
    for name, boxes in streams.items():
        order = sorted(boxes, key=lambda b: b.start_ns)
        rows.append(
            {
                "name": name,
                "start": [b.start_ns for b in order],
                "length": [b.length_ns for b in order],
                "label": [labels.setdefault(b.label, len(labels)) for b in order],
                "kind": [b.kind for b in order],
            }
        )
        if any(b.more for b in order):
            rows[-1]["more"] = [more.setdefault(b.more, len(more)) for b in order]
    return {
        "title": title,
        "hint": hint,
        "narrow": narrow,
        "end": max(end_ns, 1),
        "kinds": [{"name": n, "colour": c} for n, c in kinds],
        "labels": list(labels),
        "more": list(more),
        "streams": rows,
    }


def timeline_mount(name: str) -> str:
    """The element in which the widget draws the timeline with this name in the page's data."""
    return f"<div data-timeline='{name}'><p>The timeline is drawn by the page's script.</p></div>"
