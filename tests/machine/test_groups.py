"""Machine files of groups: how they are read and refused, and the machine for a program that treats all devices
alike."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

import pase
from pase.errors import PaseError
from pase.machine import GroupedMachine, dumps, load, parse
from pase.machine.scale import scaled

from ..command import printed

GROUPS = """
schema = "pase.machine-groups/1"
name = "two"
[[groups]]
kind = "h100x8"
count = 4
[[groups]]
kind = "v100x8"
count = 12
[between]
name = "Ethernet"
latency_s = 30e-6
bandwidth_bytes_per_s = 1.25e9
[sources]
groups = "made up"
between = "made up"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "two.toml").write_text(GROUPS)
    return tmp_path / "two.toml"


def test_a_machine_of_groups(file):
    m = load(file)
    assert isinstance(m, GroupedMachine) and m.devices == 16
    assert [(g.name, g.count) for g in m.groups] == [("h100x8", 4), ("v100x8", 12)]
    # All alike: the slower device, the smaller memory, units that divide both counts, and the link between the groups.
    assert m.device.peak_flops == load("v100x8").device.peak_flops
    assert m.device.memory_bytes == load("v100x8").device.memory_bytes
    assert [(level.name, level.ways) for level in m.levels] == [("NVLink", 4), ("Ethernet", 0)]
    assert [(level.name, level.ways) for level in m.crossing(2).levels] == [("NVLink", 2), ("Ethernet", 0)]
    assert "NVIDIA V100" in printed("machines", file)


def test_its_digest_follows_its_groups(file, tmp_path):
    base = load(file)
    for old, new in (("count = 4", "count = 8"), ("30e-6", "31e-6"), ('"h100x8"', '"h200x8"')):
        (tmp_path / "other.toml").write_text(GROUPS.replace(old, new))
        assert load(tmp_path / "other.toml").digest != base.digest
    (tmp_path / "other.toml").write_text(GROUPS.replace('"two"', '"renamed"'))
    assert load(tmp_path / "other.toml").digest == base.digest == hash_of(base)


def hash_of(m: GroupedMachine) -> str:
    assert hash(m) == hash(m.digest)
    return m.digest


def test_a_kind_may_be_a_file_beside_it_and_be_there_twice(file):
    own = file.with_name("own.toml")
    own.write_text(dumps(load("v100x8")).replace('name = "v100x8"', 'name = "own"', 1))
    file.write_text(GROUPS.replace('"v100x8"', '"own.toml"').replace('"h100x8"', '"own.toml"'))
    m = load(file)
    assert isinstance(m, GroupedMachine)
    assert [g.name for g in m.groups] == ["own#0", "own#1"]


def test_it_is_scaled_in_every_group(file):
    m = scaled(load(file), {"bandwidth": 0.5, "flops": 2.0})
    assert isinstance(m, GroupedMachine)
    assert m.between.bandwidth_bytes_per_s == 0.625e9
    assert m.groups[0].machine == scaled(load("h100x8"), {"bandwidth": 0.5, "flops": 2.0})


def test_what_is_wrong_is_said(file):
    for old, new, said in (
        ('"h100x8"', '"h1000x8"', r"at groups/0/kind: .* 'h1000x8'"),
        ('"h100x8"', '"two.toml"', r"at groups/0/kind: .* is a machine of groups"),
        ("count = 4", "count = 0", r"at groups/0/count: "),
        ("count = 4", "", r"at groups/0/count: is missing"),
        ('between = "made up"', "", r"between.latency_s has no source"),
        ("[between]", "[betwixt]", r"at betwixt: is not known"),
    ):
        file.write_text(GROUPS.replace(old, new, 1))
        with pytest.raises(PaseError, match=said):
            load(file)
    with pytest.raises(PaseError, match="a file of its own") as e:
        parse(GROUPS, "some text")
    assert e.value.where == "some text"
    file.write_text(GROUPS)
    with pytest.raises(PaseError, match="consists of groups") as e:
        dumps(load(file))
    assert e.value.where == "machine 'two'"


def test_the_published_schema_is_that_of_the_form():
    checks = jsonschema.Draft202012Validator(
        json.loads((Path(pase.__file__).parent / "machine" / "groups.schema.json").read_text())
    )
    assert checks.is_valid(tomllib.loads(GROUPS))
    assert not checks.is_valid(tomllib.loads(GROUPS.replace("count = 4", "count = 0")))
