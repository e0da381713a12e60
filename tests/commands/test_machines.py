"""``pase machines``."""

import json

import pytest

from pase.commands.machines import machines
from pase.errors import PaseError
from pase.machine import dumps, load, names


def test_the_table_names_every_machine(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    machines(None, False)
    shown = capsys.readouterr().out
    assert all(name in shown for name in names())
    assert "h100x8 (default)" in shown


def test_one_machine_with_its_sources(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # no source is wrapped
    machines("H100_x8", False)
    shown = capsys.readouterr().out
    m = load("h100x8")
    assert m.digest in shown
    assert all(source in shown for source in m.sources.values())


def test_json_is_one_object(capsys):
    machines(None, True)
    everything = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in everything["machines"]] == names()
    machines("tpu_v5e", True)
    one = json.loads(capsys.readouterr().out)
    assert one == next(m for m in everything["machines"] if m["name"] == "tpu_v5e")
    assert one["digest"] == load("tpu_v5e").digest


def test_a_file_of_ones_own_and_one_that_is_not_there(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(dumps(load("cpu_host")).replace('name = "cpu_host"', 'name = "mine"'))
    machines(str(path), True)
    assert json.loads(capsys.readouterr().out)["name"] == "mine"
    with pytest.raises(PaseError, match="no machine named 'abacus'"):
        machines("abacus", True)
    with pytest.raises(PaseError, match="did you mean 'h100x8'"):
        machines("h100", True)
