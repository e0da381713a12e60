"""The codec: files of earlier versions load, schemas are derived from types, and errors say what is wrong and where."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Meta, Struct, UnsetType

import pase
from bench.pages.schemas import ROOT, SCHEMAS
from pase.errors import PaseError, printable
from pase.files.codec import convert, form_of, json_schema, parse_json, read_json, to_tree, value_of
from pase.machine import dumps, parse
from pase.plan.layout import to_json
from pase.replay.traces import timeline_io
from pase.schedule import io

LAST = Path(__file__).parent / "last"
"""Written by the version before there was one codec (commit cff8d45)."""


@pytest.mark.parametrize("file", sorted(SCHEMAS))
def test_the_committed_schema_is_the_types(file):
    """To regenerate them after changing a form: python -m bench pages.schemas."""
    made = json.loads(json.dumps(SCHEMAS[file]()))
    jsonschema.Draft202012Validator.check_schema(made)
    assert json.loads((ROOT / file).read_text(encoding="utf-8")) == made


@pytest.mark.parametrize("name", ["layout-buckets", "layout-accumulated"])
def test_layouts_of_the_last_version_load_and_stay_as_they_are(name):
    path = LAST / f"{name}.json"
    plan = pase.load(path)
    assert to_json(plan) == json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(to_json(plan), SCHEMAS["pase/plan/layout-1.json"]())
    assert plan.accesses == {} and (plan.buckets is not None) == (name == "layout-buckets")


def test_a_machine_of_the_last_version_is_the_one_that_its_layouts_name():
    """A new field with its default value changes no digest. Otherwise no earlier layout would find its machine."""
    machine = parse((LAST / "machine.toml").read_text(encoding="utf-8"), "machine.toml")
    assert machine.digest == "bd1601a917d08d8a64b7dbe306da2dd80cdd39c97643bf54de476e0a5f4b8fa2"
    assert parse(dumps(machine), "again") == machine


def test_a_timeline_of_the_last_version_loads_and_stays_as_it_is():
    data = json.loads((LAST / "timeline.json").read_text(encoding="utf-8"))
    assert timeline_io.to_json(timeline_io.load_timeline(LAST / "timeline.json")) == data


def test_a_schedule_of_the_last_version_loads_and_stays_as_it_is():
    problem, plan = (
        json.loads((LAST / f"{n}.json").read_text(encoding="utf-8")) for n in ("problem", "bucket_plan")
    )
    read = io.problem_from_json(problem)
    assert io.problem_to_json(read) == problem
    assert io.plan_to_json(read, io.plan_from_json(plan, read), link_costs=True) == plan
    assert io.links_from_json(plan) == read.links
    for tree, name in ((problem, "problem"), (plan, "bucket_plan")):
        jsonschema.validate(tree, io.schema(name))


@dataclass(frozen=True, kw_only=True)
class Leaf:
    ways: Annotated[int, Meta(ge=1)]
    rate: Annotated[float, Meta(gt=0)] = 1.0


class Form(Struct, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["ring", "tree"]
    leaves: dict[str, list[Leaf]] = {}
    at: Annotated[tuple[int, ...], Meta(min_length=1)] | None = None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "at kind: is missing"),
        ({"kind": "star"}, "at kind: must be one of ring, tree, got 'star'"),
        ({"kind": "ring", "speed": 1}, "at speed: is not known; the top level takes: kind, leaves, at"),
        ({"kind": "ring", "leaves": []}, "at leaves: must be an object, got []"),
        ({"kind": "ring", "leaves": {"a": [], "b": {}}}, "at leaves/b: must be a list, got {}"),
        ({"kind": "ring", "leaves": {"a": [{"ways": 0}]}}, "at leaves/a/0/ways: must be at least 1, got 0"),
        (
            {"kind": "ring", "leaves": {"a": [{"ways": True}]}},
            "at leaves/a/0/ways: must be a whole number, got True",
        ),
        (
            {"kind": "ring", "leaves": {"a": [{"ways": 1, "rate": 0}]}},
            "at leaves/a/0/rate: must be above 0, got 0",
        ),
        ({"kind": "ring", "leaves": {"a": [{}]}}, "at leaves/a/0/ways: is missing"),
        ({"kind": "ring", "at": []}, "at at: must have at least 1 entry, got []"),
        ({"kind": "ring", "at": ["x"]}, "at at/0: must be a whole number, got 'x'"),
        ([], "at the top level: must be an object, got []"),
    ],
)
def test_an_error_says_what_and_where(tree, message):
    with pytest.raises(PaseError) as e:
        convert(tree, Form, "f.json")
    assert (e.value.where, e.value.what) == ("f.json", message)


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 9), max_size=40), st.data())
def test_the_first_bad_key_of_a_mapping_is_named(sizes, data):
    """It is found by bisection, whatever the other keys are. The oracle checks each key in turn."""
    bad = data.draw(st.sets(st.sampled_from(sorted(sizes)))) if sizes else set()
    tree = {"kind": "ring", "leaves": {k: [{"ways": -1 if k in bad else v}] for k, v in sizes.items()}}
    first = next((k for k in tree["leaves"] if k in bad), None)
    if first is None:
        assert [leaf.ways for leaves in convert(tree, Form, "f").leaves.values() for leaf in leaves] == list(
            sizes.values()
        )
        return
    with pytest.raises(PaseError) as e:
        convert(tree, Form, "f")
    assert printable(e.value.what) == f"at leaves/{printable(first)}/0/ways: must be at least 1, got -1"


def test_numbers_of_numpy_are_written_and_nothing_unknown_is():
    assert to_tree({"a": np.float64(0.5), "b": (np.int32(3),)}) == {"a": 0.5, "b": [3]}
    with pytest.raises(NotImplementedError, match="object"):
        to_tree({"a": object()})


def test_a_schema_refuses_what_the_type_refuses():
    made = jsonschema.Draft202012Validator(json_schema(Form, "a form"))
    assert made.is_valid({"kind": "ring", "leaves": {"a": [{"ways": 1}]}})
    assert not made.is_valid({"kind": "ring", "leaves": {"a": [{"ways": 0}]}})
    assert not made.is_valid({"kind": "ring", "speed": 1})


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "big.json"
    path.write_text(" " * 100)
    with pytest.raises(PaseError, match=r"100 bytes.* a layout .* 99") as e:
        read_json(path, "a layout", 99)
    assert e.value.where == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("9" * 5000, "limit .4300 digits"),
        (b'{"a": "\xff"}', "not text at byte 7"),
        ('{"a": 1', "not JSON at line 1, column 8"),
        ('{"a":\n "\\u001b[2J"}', r"x, line 2: a control character"),
        ('{"a": "\\b"}', "control character"),
        ('{"a\\\\\\u009b": 1}', "control character"),
        ('"\x7f"', "control character"),
    ],
)
def test_a_text_from_a_stranger_is_refused_with_its_place(text, message):
    with pytest.raises(PaseError, match=message):
        parse_json(text, "x")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from("\\\n\t\r")), st.booleans())
def test_names_that_command_nothing_are_read_as_they_are(name, escaped):
    """Some names have backslashes in front of a u that escape nothing."""
    assert parse_json(json.dumps({name: "\\u001b"}, ensure_ascii=escaped), "x") == {name: "\\u001b"}


@dataclass(frozen=True, kw_only=True)
class Crate:
    """A value with each kind of default."""

    name: str
    count: int = 1
    weight: float | None = None
    labels: tuple[str, ...] = ()
    inside: dict[str, int] = field(default_factory=dict)


class CrateForm(Struct, kw_only=True):
    """Its form: the name is called title, the count is always written, and the rest may be absent."""

    title: str
    count: int
    weight: float | UnsetType = UNSET
    labels: tuple[str, ...] | UnsetType = UNSET
    inside: dict[str, int] | UnsetType = UNSET
    packed_s: float | UnsetType = UNSET


CRATES = st.builds(
    Crate,
    name=st.text(),
    count=st.integers(0, 2),
    weight=st.none() | st.sampled_from([0.0, 1.5]),
    labels=st.lists(st.text()).map(tuple),
    inside=st.dictionaries(st.text(), st.integers(0, 2)),
)


@given(CRATES)
def test_a_value_comes_back_from_its_form_and_defaults_are_left_out(crate: Crate) -> None:
    tree = to_tree(form_of(crate, CrateForm, title=crate.name))
    kept = {"weight": crate.weight is not None, "labels": bool(crate.labels), "inside": bool(crate.inside)}
    assert tree.keys() == {"title", "count", *(k for k, written in kept.items() if written)}
    form = convert(tree, CrateForm, "a crate")
    assert value_of(form, Crate, name=form.title) == crate


def test_a_field_that_the_value_does_not_have_must_be_given() -> None:
    with pytest.raises(TypeError, match="title"):
        form_of(Crate(name="a"), CrateForm)
    form = form_of(Crate(name="a"), CrateForm, title="b", packed_s=2.0)
    assert form.packed_s == 2.0 and value_of(form, Crate, name="c", count=UNSET) == Crate(name="c")
