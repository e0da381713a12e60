"""Faults of a layout that types cannot express, each with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pase.files.codec import convert
from pase.plan.layout import to_json
from pase.plan.layout_form import LayoutForm, problems
from tests.plan.plans import mlp, staged


def found(*path: str | int, value: Any, of: Any = mlp) -> list[str]:
    """Return the faults of the plan's layout with one value changed, each as "place: what"."""
    data = json.loads(json.dumps(to_json(of())))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return [f"{fault.place}: {fault.what}" for fault in problems(convert(data, LayoutForm, "layout"))]


def test_a_layout_that_was_written_has_none() -> None:
    assert found("devices", value=4) == []
    assert found("devices", value=8, of=staged) == []


@pytest.mark.parametrize(
    ("path", "value", "of", "says"),
    [
        (("devices",), 5, mlp, "mesh: {'model': 2, 'model2': 2} is not 5 devices"),
        (("collectives", 0, "axes"), [], mlp, "collectives/0/axes: a collective must run along at least one"),
        (("collectives", 0, "axes"), ["z"], mlp, "collectives/0/axes: mesh axis 'z' does not exist"),
        (("strategy", 0, "split"), {"b": ["model", "model"]}, mlp, "/split: a mesh axis is used twice"),
        (("strategy", 3, "reads"), ["nowhere"], mlp, "/reads: there is no node 'nowhere'"),
        (("accesses", "layouts"), [], mlp, "a layout number is out of range; there are 0"),
        (("pipeline", "degree"), 4, staged, "pipeline: 2 cuts and 2 stages for 4 ranks of 1 chunks"),
        (("pipeline", "groups"), ["fast"], staged, "pipeline/groups: 1 groups for 2 ranks"),
        (
            ("pipeline", "stages", 1, "rank"),
            2,
            staged,
            "pipeline/stages/1: rank 2 or strategy 0 does not exist",
        ),
        (
            ("pipeline", "stages_of"),
            {"w": [2]},
            staged,
            "pipeline/stages_of/w: a stage is out of range; there are 2",
        ),
    ],
)
def test_each_fault_has_its_place(path: Any, value: Any, of: Any, says: str) -> None:
    assert any(says in fault for fault in found(*path, value=value, of=of))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shape": [7, 8]}, "a dim of 7 elements cannot be split evenly into 2 shards"),
        ({"shape": [8]}, "the layout has 2 dims, but the shape is [8]"),
        ({"state": [["model"], ["model"]]}, "/state: a mesh axis is used twice"),
    ],
)
def test_shards_divide_their_dims(changed: dict[str, Any], says: str) -> None:
    tensor = {"shape": [8, 8], "dtype": "float32", "storage": [["model"], ["model2"]], "used_as": []}
    assert found("parameters", value={"w": tensor}) == []
    (fault,) = found("parameters", value={"w": tensor | changed})
    assert fault.startswith("parameters/w/") and says in fault
