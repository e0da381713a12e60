"""Data of timelines."""

from __future__ import annotations

from pase.pages.streams import StreamBox, drawn_streams


def test_streams_are_in_order_and_name_each_label_once() -> None:
    boxes = [
        StreamBox(label="b", kind=0, start_ns=5, length_ns=1),
        StreamBox(label="b", kind=0, start_ns=1, length_ns=2),
    ]
    drawn = drawn_streams("t", {"s": boxes}, [("k", "compute")], end_ns=9, hint="")
    assert drawn["streams"] == [
        {"name": "s", "start": [1, 5], "length": [2, 1], "label": [0, 0], "kind": [0, 0]}
    ]
    assert drawn["labels"] == ["b"]
