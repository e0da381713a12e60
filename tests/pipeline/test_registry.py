"""Every registered schedule is sound; unknown names and impossible numbers are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from pase.errors import PaseError
from pase.pipeline.order import order_of
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import in_flight
from pase.pipeline.types import Kind
from tests.pipeline.timing import CASES, sizes


@pytest.mark.parametrize(("name", "v"), CASES)
@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_every_schedule_does_all_of_its_work_and_never_deadlocks(name, v, p, m):
    d = SCHEDULES[name]
    if d.refuses(p, m, v):
        with pytest.raises(PaseError, match=name):
            schedule(name, p, m, v)
        return
    s = schedule(name, p, m, v)
    order = order_of(s)  # complete and free of deadlock, or an error
    assert order.kind.size == sum(map(len, s.orders))
    done = {(a.stage, a.micro) for o in s.orders for a in o if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    assert len(done) == p * v * m
    for r in range(p):  # all activations are freed
        assert not in_flight(s, r)[-1].any()


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(PaseError, match=r"'1fb'.*'1f1b'"):
        schedule("1fb", 2, 4)
    for name, micro_batches, wrong in (("interleaved", 6, "not 6"), ("1f1b", 8, "not 2")):
        with pytest.raises(PaseError) as e:
            schedule(name, 4, micro_batches, 2)
        assert e.value.where == f"schedule '{name}'" and e.value.what.endswith(wrong) and e.value.fix
