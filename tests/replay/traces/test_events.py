"""Events of Chrome-format JSON: decoded many at a time, they are those that are read one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.replay.traces import events as reading
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import BoundedReader
from pase.replay.types import Timeline
from tests.needs import SHARED

pytest.importorskip("ijson")


def kernel(number: int, **more: Any) -> dict[str, Any]:
    args = {"stream": 7, "device": 0, "correlation": number, "grid": [512, 1, 1]}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"k{number % 5}",
        "ts": 10.5 * number,
        "dur": 5.25,
        "args": args,
    } | more


ODD = {
    "sound": [],
    "a string like a cut": [kernel(90, name="a},{b"), kernel(91, name='}, {"ph": "X"')],
    "objects in lists": [kernel(90, other=[{"a": 1}, {"b": [{}, {}]}, {}])],
    "no objects": [5, "}, {", None, [{}, {}]],
    "arguments that are none": [kernel(90, args=[1, 2]), kernel(91, args=None), kernel(92, args="x")],
    "unsigned 64-bit numbers": [kernel(90, args={"stream": 7, "correlation": (1 << 64) - 5})],
    "beyond a float": ["1e999"],
    "not a number": ["NaN"],
    "an event without a kind": [{}, {"ph": "X"}],
}


def same(a: Timeline, b: Timeline) -> None:
    assert (a.names, a.lanes, a.groups, a.marks, a.shapes) == (b.names, b.lanes, b.groups, b.marks, b.shapes)
    assert [str(p) for p in a.problems] == [str(p) for p in b.problems]
    for k, v in a.columns.items():
        assert np.array_equal(v, b.columns[k]), k


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """Reads a file both ways, asserts that they agree, and returns what was read."""
    fast = load(path)
    with monkeypatch.context() as m:
        m.setattr(reading, "_BYTES", 0)  # nothing is decoded before the list's begin is known
        slow = load(path)
    same(fast, slow)
    return fast


@pytest.mark.parametrize("layout", ["document", "list", "events last"])
@pytest.mark.parametrize("odd", ODD)
def test_events_decoded_together_are_those_read_one_by_one(
    odd: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedReader, "CHUNK", 400)
    monkeypatch.setattr(reading, "_BYTES", 1000)
    made = [*map(kernel, range(40)), *ODD[odd], *map(kernel, range(40, 80))]
    text = json.dumps(made).replace('"1e999"', '{"ph": "X", "ts": 1e999, "dur": 1}')
    text = text.replace('"NaN"', '{"ph": "X", "ts": 7, "dur": NaN}').replace('"k3"', '"k\\n3"')
    end = ', "deviceProperties": [{"name": "A card"}, {"name": "A card"}], "traceName": "x"}'
    if layout == "document":
        text = '{"schemaVersion": 1, "traceEvents": ' + text + end
    elif layout == "events last":
        text = "{" + end[2:-1] + ', "note": "\\"traceEvents\\": [", "traceEvents": ' + text + "}"
    (tmp_path / "rank0.json").write_text(text)
    t = both(tmp_path / "rank0.json", monkeypatch)
    assert len(t) >= 80
    assert (t.devices == {0: "A card"}) == (layout != "list")


def test_most_of_a_file_is_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above compare two ways, and reading is as fast as it was measured."""
    monkeypatch.setattr(BoundedReader, "CHUNK", 400)
    monkeypatch.setattr(reading, "_BYTES", 1000)
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [*map(kernel, range(200))]}, indent=1))
    whole = []
    decode = reading._decoded

    def counted(held: bytes) -> tuple[list[reading.TraceEvent | None], int]:
        made, used = decode(held)
        whole.extend(made)
        return made, used

    monkeypatch.setattr(reading, "_decoded", counted)
    assert len(load(tmp_path)) == 200
    assert len(whole) > 180


@pytest.mark.data("measured/tracelens")
@pytest.mark.parametrize("card", ["h100", "mi300"])
def test_real_traces_are_read_the_same_both_ways(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tests__traces__{card}__Falconsai_nsfw_image_detection__1016002.json.gz"
    both(SHARED / "measured/tracelens" / name, monkeypatch)
