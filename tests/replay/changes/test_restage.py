"""A measured graph as pipeline stages: the step's length is counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.replay.changes.restage import StageTransfer, staged
from pase.replay.graph import EDGES, DataflowGraph, build_graph
from pase.replay.simulation.sections import Sections, StepPhase
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import KINDS

F, B, U = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.UPDATE
SENT = StageTransfer(nbytes=64, duration_ns=5.0)


def measured(micro_batches: int) -> tuple[DataflowGraph, Sections]:
    """One stream with two layers: 10 and 20 ns in forward, 30 (layer 1) and 40 (layer 0) in backward, 8 in update."""
    rows = [
        row
        for m in range(micro_batches)
        for row in ((F, m, 0, 10), (F, m, 1, 20), (B, m, 1, 30), (B, m, 0, 40))
    ]
    rows.append((U, micro_batches - 1, 0, 8))
    kernel = {"device": (0, "stream 7"), "kind": KINDS.index("kernel")}
    tasks = [{**kernel, "duration_ns": ns, "name": f"{p.name} {m} {l}"} for p, m, l, ns in rows]
    g = build_graph(tasks, [(i, i + 1) for i in range(len(rows) - 1)])
    phase, micro, layer = (np.array(x) for x in list(zip(*rows, strict=True))[:3])
    s = Sections(
        rank=0,
        phase=phase,
        micro=micro,
        layer=layer,
        micro_batches=micro_batches,
        layers=2,
        order=np.arange(len(rows)),
        compute=0,
        product={},
        shapes={},
    )
    return replace(g, edge_kind=np.full(len(g.src), EDGES.index("stream"), np.uint8)), s


def test_one_micro_batch_goes_through_the_stages_and_back() -> None:
    g, s = measured(1)
    made = staged(g, s, [[(F, 0), (B, 0)]] * 2, [1, 1], SENT)
    assert made.ranks == (0, 1)
    # Each stage has half of the layers, and half of the update.
    assert replay_graph(made).makespan_ns == 10 + 5 + 20 + 30 + 5 + 40 + 8 / 2


def test_one_stage_is_the_run_as_it_was_measured() -> None:
    g, s = measured(2)
    made = staged(g, s, [[(F, 0), (B, 0), (F, 1), (B, 1)]], [2], SENT)
    assert len(made) == len(g) and replay_graph(made).makespan_ns == replay_graph(g).makespan_ns


def test_micro_batches_overlap_as_the_schedule_orders_them() -> None:
    """1F1B with two micro-batches. The last stage is never idle between its first and its last action."""
    g, s = measured(2)
    orders = [[(F, 0), (F, 1), (B, 0), (B, 1)], [(F, 0), (B, 0), (F, 1), (B, 1)]]
    # Stage 1 works from 15 to 115. Its second gradient arrives at 120, after stage 0's first backward (70 to 110).
    assert replay_graph(staged(g, s, orders, [1, 1], SENT)).makespan_ns == 15 + 100 + 5 + 40 + 4


def test_a_stage_without_a_layer_is_refused() -> None:
    g, s = measured(1)
    with pytest.raises(Infeasible, match="no kernel in forward of micro-batch 0") as e:
        staged(g, s, [[(F, 0), (B, 0)]] * 2, [2, 0], SENT)
    assert e.value.where == "stage 1" and "fewer stages" in e.value.fix
