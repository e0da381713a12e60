"""Machine files by the names that drivers report."""

from __future__ import annotations

import pytest

from pase.machine import load, names
from pase.machine.recognize import device_named


@pytest.mark.parametrize(
    ("reported", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100x8"),
        ("NVIDIA A100-SXM4-80GB", "a100x8"),
        ("NVIDIA A100-PG509-200", "a100x8"),
        ("NVIDIA H200", "h200x8"),
        ("NVIDIA B200", "b200x8"),
        ("AMD Instinct MI300X VF", "mi300x8"),
        ("Tesla V100-SXM2-32GB", "v100x8"),
    ],
)
def test_a_device_is_known_by_its_model(reported: str, machine: str) -> None:
    found = device_named(reported)
    assert found is not None and found.name == load(machine).device.name


@pytest.mark.parametrize("reported", ["NVIDIA H800", "NVIDIA L4 80GB", "", "cpu", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_device_is_not_another_of_its_size(reported: str) -> None:
    assert device_named(reported) is None


def test_every_file_recognizes_its_own_device() -> None:
    for name in names():
        device = load(name).device
        if any(c.isdigit() for c in device.name):
            assert device_named(device.name) == device
