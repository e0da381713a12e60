"""``pase doctor``."""

from __future__ import annotations

from importlib import metadata

import pytest

import pase
from pase.commands import doctor
from pase.errors import DISTRIBUTION
from tests.command import reported, run


def test_it_says_what_is_there_and_makes_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(doctor._DEVICES, "torch")  # its import takes seconds
    found = reported("doctor")
    jax = found["extras"]["jax"]
    assert (
        jax["versions"]["jax"] == metadata.version("jax") and jax["missing"] == [] and jax["install"] is None
    )
    assert found["devices"]["jax"].split()[1] in ("cpu", "gpu", "tpu")
    assert found["plan"]["error"] is None and found["plan"]["seconds"] > 0


def test_the_other_program_called_pase_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index has one, and both are installed into the folder ``pase``."""
    monkeypatch.setattr(doctor, "_devices", lambda framework: "1 cpu")
    have = {"pase": "3.1.4", DISTRIBUTION: "0.1.0"}
    monkeypatch.setattr(doctor, "_version", have.get)
    assert reported("doctor")["other_pase"] == "3.1.4"
    code, out, _ = run("doctor")
    assert code == 0 and "pip uninstall pase" in " ".join(out.split())
    del have[DISTRIBUTION]  # run from its sources, or installed before it had this name
    found = reported("doctor")
    assert found["other_pase"] is None and found["pase"] == pase.__version__


def test_what_is_missing_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in ("onnx", "jax") else "1.0")
    monkeypatch.setattr(doctor, "_devices", lambda framework: "1 cpu")
    code, out, _ = run("doctor")
    assert code == 0 and "no: pip install" in " ".join(out.split())
    found = reported("doctor")
    assert found["extras"]["onnx"]["missing"] == ["onnx"] and "jax" not in found["devices"]
