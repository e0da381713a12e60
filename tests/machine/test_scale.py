"""A machine whose figures are wrong by a factor."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.costmodels import get
from pase.errors import PaseError
from pase.machine import CollectiveCurve, Curve, dumps, load, mesh_from, names, parse
from pase.machine.scale import QUANTITIES, scaled

MESH = mesh_from("4x8", 32)
factors = st.floats(0.1, 10.0)
machines = st.sampled_from([n for n in names() if n != "tpu_v5e"])
TABLE = Curve(nbytes=(1e3, 1e6, 1e9), seconds=(1e-5, 3e-5, 1e-2))
MEASURED = replace(
    load("a100x8"),
    collectives=tuple(CollectiveCurve(kind="all_reduce", ways=w, curve=TABLE) for w in ((8, 1), (8, 4))),
    device=replace(load("a100x8").device, memory_curve=TABLE),
    sources=load("a100x8").sources | {"device.memory_curve": "a test", "collectives": "a test"},
)


def test_nothing_scaled_is_the_same_machine():
    for name in names():
        assert scaled(load(name), {}) == load(name)
        assert scaled(load(name), dict.fromkeys(QUANTITIES, 1.0)).digest == load(name).digest
    assert scaled(MEASURED, dict.fromkeys(QUANTITIES, 1.0)).digest == MEASURED.digest


def test_a_scaled_machine_is_a_sound_machine_file():
    for m in (MEASURED, *map(load, names())):
        slow = scaled(m, {"bandwidth": 0.5, "latency": 3.0, "flops": 0.7, "memory": 2.0})
        assert parse(dumps(slow), "scaled") == slow


@given(machines, factors, st.floats(3, 9))
def test_latency_and_bandwidth_together_scale_every_collective(name, f, size):
    """f times the latency at 1/f of the bandwidth takes f times the time, whatever the algorithm."""
    for m in (load(name), MEASURED):
        model, slow = get("analytic", m), get("analytic", scaled(m, {"latency": f, "bandwidth": 1 / f}))
        for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
            before, after = (x.collective(kind, MESH, np.arange(4), 10.0**size) for x in (model, slow))
            assert after == pytest.approx(before * f, rel=1e-9)


@given(machines, st.sampled_from(list(QUANTITIES)), st.tuples(factors, factors), st.floats(3, 9))
def test_faster_is_never_more_expensive(name, quantity, pair, size):
    low, high = sorted(pair) if quantity != "latency" else sorted(pair, reverse=True)
    for m in (load(name), MEASURED):
        slow, fast = (get("analytic", scaled(m, {quantity: f})) for f in (low, high))
        n = 10.0**size
        collective = [x.collective("all_reduce", MESH, np.arange(4), n) for x in (slow, fast)]
        assert (collective[1] <= collective[0] * (1 + 1e-9)).all()
        for kind in ("matmul", "memory"):
            work = [float(x.compute(kind, "float32", n * 100, n)) for x in (slow, fast)]
            assert work[1] <= work[0] * (1 + 1e-9)


def test_unknown_quantities_and_senseless_factors_are_refused():
    with pytest.raises(PaseError, match="'speed'") as e:
        scaled(load("h100x8"), {"speed": 2.0})
    assert all(quantity in e.value.fix for quantity in QUANTITIES)
    with pytest.raises(PaseError, match="by 0") as e:
        scaled(load("h100x8"), {"bandwidth": 0.0})
    assert e.value.where == "bandwidth"
