"""Machines written and read back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.machine import CollectiveCurve, Curve, MatmulTable, Tile, dumps, load, names, parse

positive = st.floats(1e-12, 1e18)


@pytest.mark.parametrize("name", names())
def test_package_machines_survive_a_round_trip(name):
    m = load(name)
    again = parse(dumps(m), "again")
    assert again == m
    assert again.digest == m.digest


def rising(numbers):
    return tuple(sorted(set(numbers)))


@given(
    seconds=st.lists(positive, min_size=2, max_size=6, unique=True).map(rising),
    bandwidth=positive,
    latency=st.floats(0, 1),
    words=st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20),
)
def test_measured_machines_survive_a_round_trip(seconds, bandwidth, latency, words):
    base = load("v100x8")
    curve = Curve(nbytes=tuple(10.0**i for i in range(len(seconds))), seconds=seconds)
    table = MatmulTable(dtype="bfloat16", m=(1, 2), n=(3,), k=(4,), flops_per_s=(1e12, 1.5e12))
    m = replace(
        base,
        levels=(
            replace(base.levels[0], bandwidth_bytes_per_s=bandwidth, latency_s=latency),
            base.levels[1],
        ),
        device=replace(
            base.device,
            matmul_tables=(table,),
            memory_curve=curve,
            tiles=(Tile(m=1, n=2, k=3, rate=0.5),),
        ),
        collectives=(CollectiveCurve(kind="all_reduce", ways=(8, 1), curve=curve),),
        sources={**base.sources, "device": words, "collectives": words},
        provenance={"driver": words},
    )
    assert parse(dumps(m), "again") == m


def test_a_machine_that_could_not_be_read_back_is_not_written():
    m = load("h100x8")
    broken = Curve(nbytes=(1.0, 2.0), seconds=(2.0, 1.0))
    measured = replace(
        m, device=replace(m.device, memory_curve=broken), sources={**m.sources, "device": "me"}
    )
    with pytest.raises(PaseError, match=r"device/memory_curve: .*1 s at 2 bytes"):
        dumps(measured)


def test_a_number_at_its_default_keeps_its_source():
    m = load("h100x8")
    level = replace(m.levels[0], efficiency=1.0)
    measured = replace(m, levels=(level, m.levels[1]))
    assert "levels.0.efficiency" in m.sources
    assert parse(dumps(measured), "again") == measured
