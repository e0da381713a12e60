"""The error if nothing fits says what would."""

import pytest

import pase
from pase.errors import Infeasible
from tests.compiler.meshes.models import MODEL, WIDE, wide


def test_what_cannot_fit_says_what_would():
    with pytest.raises(Infeasible, match=r"0\.0009766 GiB .* on 4 devices: .* [\d.]+ GiB") as e:
        pase.compile(MODEL, devices=4, memory_limit=2**20)
    assert "devices" in e.value.fix


def test_what_cannot_fit_says_how_near_it_comes():
    with pytest.raises(Infeasible, match=r"\(4096 micro-batches, mesh 2\)") as e:
        pase.compile(wide, *WIDE, devices=2, memory_limit=64)
    assert "128 devices" in e.value.fix
    with pytest.raises(Infeasible, match=r"on 2 devices: .*; use (4|8|16) devices"):
        least = pase.compile(wide, *WIDE, devices=2, accumulate=4096, baselines=False).memory
        pase.compile(wide, *WIDE, devices=2, memory_limit=least.total / 4)
