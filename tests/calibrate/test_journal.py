"""The journal of a calibration: whose it is, and damage to it."""

import dataclasses
import json

import pytest

from pase.calibrate import Journal
from pase.calibrate.types import Sample
from pase.errors import PaseError
from tests.calibrate.synthetic import HERE


def test_a_journal_of_another_machine_is_refused(tmp_path):
    path = tmp_path / "m.journal"
    Journal(path, HERE).add(Sample(key="x", seconds=1.0, spread=0.0, repeats=1, inner=1))
    with pytest.raises(PaseError, match="devices is 4") as e:
        Journal(path, {**HERE, "devices": 8})
    assert e.value.where == str(path) and "--fresh" in e.value.fix
    assert not Journal(path, {**HERE, "devices": 8}, fresh=True).samples


def test_what_is_no_journal_is_refused_and_damage_is_named(tmp_path):
    path = tmp_path / "m.journal"
    path.write_text("hello\n")
    with pytest.raises(PaseError, match="not a journal") as e:
        Journal(path, HERE)
    assert e.value.where == str(path)
    Journal(path, HERE, fresh=True)
    line = json.dumps(dataclasses.asdict(Sample(key="x", seconds=1.0, spread=0.0, repeats=1, inner=1)))
    path.write_text(path.read_text() + "torn\n" + line + "\n")
    with pytest.raises(PaseError, match="cannot be read") as e:
        Journal(path, HERE)
    assert e.value.where == f"{path}:2"
