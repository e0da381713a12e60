"""The order of a schedule's actions; what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.errors import PaseError
from pase.pipeline.order import order_of
from pase.pipeline.registry import schedule
from pase.pipeline.types import Action, Kind, Schedule
from tests.pipeline.timing import CASES


def test_a_deadlock_is_named():
    f, b = Kind.FORWARD, Kind.BACKWARD
    swapped = Schedule(
        name="crossed",
        micro_batches=2,
        rank_of=(0, 1),
        orders=(
            (Action(0, f, 0), Action(0, b, 0), Action(0, f, 1), Action(0, b, 1)),
            (Action(1, f, 0), Action(1, f, 1), Action(1, b, 0), Action(1, b, 1)),
        ),
    )
    lost = replace(swapped, orders=(swapped.orders[0], swapped.orders[1][:3]))
    early = replace(swapped, orders=(swapped.orders[0], (Action(1, b, 0), *swapped.orders[1])))
    for wrong, named in (
        (swapped, {"0B0", "1I0", "1F1"}),
        (lost, {"stage 1", "micro-batch 1"}),
        (early, {"rank 1", "1B0"}),
    ):
        with pytest.raises(PaseError) as e:
            order_of(wrong)
        assert e.value.where == "schedule 'crossed'" and all(name in e.value.what for name in named)


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_actions_wait_only_for_earlier_waves_and_for_what_they_need(name, chunks):
    ranks, micro_batches = 3, 6
    s = schedule(name, ranks, micro_batches, chunks)
    o = order_of(s)
    wave = np.repeat(np.arange(len(o.wave) - 1), np.diff(o.wave))
    for earlier in (o.before, o.waits):
        some = earlier >= 0
        assert (wave[earlier[some]] < wave[some]).all()
    for r in range(ranks):  # each rank keeps its own order
        mine = np.flatnonzero(o.rank == r)
        listed = [(a.stage, a.kind, a.micro) for a in s.orders[r]]
        assert list(zip(o.stage[mine], o.kind[mine], o.micro[mine], strict=True)) == listed
        assert o.before[mine].tolist() == [-1, *mine[:-1]] and o.last[r] == mine[-1]
    for a in np.flatnonzero(o.waits >= 0):
        step = -1 if o.kind[a] == Kind.FORWARD else 1
        assert o.stage[o.waits[a]] == o.stage[a] + step and o.micro[o.waits[a]] == o.micro[a]
        crosses = o.rank[o.waits[a]] != o.rank[a]
        assert o.send[a] == (min(o.stage[a], o.stage[a] + step) if crosses else -1)
