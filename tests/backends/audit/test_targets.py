"""What XLA is told about the devices of a machine, from its file alone."""

from __future__ import annotations

import dataclasses

import pytest

from pase.backends.audit.targets import devices_of
from pase.errors import PaseError
from pase.machine import load, names

COMPILED = [n for n in names() if load(n).compiler is not None]


@pytest.mark.parametrize("name", COMPILED)
def test_every_machine_with_a_compiler_has_devices(name):
    machine = load(name)
    devices = devices_of(machine, 8)
    assert devices.platform == {"cuda": "gpu", "tpu": "tpu", "cpu": "cpu"}[machine.compiler.platform]
    assert devices.environment["JAX_PLATFORMS"] == "cpu"


def test_hosts_of_gpus():
    """The innermost link joins the GPUs of a host."""
    assert devices_of(load("h100x8"), 32).topology == "1x4x8"
    assert devices_of(load("h100x8"), 4).topology == "1x1x4"
    assert devices_of(load("gb200_nvl72"), 64).topology == "1x1x64"
    config = devices_of(load("a100x8"), 8).config
    assert "core_count: 108" in config and "major: 8 minor: 0" in config and "clock_rate_ghz: 1.41" in config


def test_slices_of_tpus():
    machine = load("tpu_v5e")
    assert devices_of(machine, 32).topology == "v5e:4x8" and devices_of(machine, 256).topology == "v5e:16x16"
    with pytest.raises(PaseError, match="no slice of 24 chips"):
        devices_of(machine, 24)


def test_a_missing_compiler_is_one_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("pase.backends.audit.targets._found", lambda module: False)
    machine = load("h100x8")
    with pytest.raises(PaseError) as e:
        devices_of(machine, 8).check(machine)
    assert e.value.fix.startswith("pip install jax-cuda12-pjrt==")
    with pytest.raises(PaseError, match="does not say how to compile"):
        devices_of(dataclasses.replace(machine, compiler=None), 8)
