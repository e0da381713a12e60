"""Replays under another bucket plan agree with independent simulations of runs that use that plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, bucketed, simulate, write
from pase.bridges.replan import as_measured, replan, what_if_bucket_plan
from pase.bridges.trace_profile import problem_from_timeline
from pase.errors import PaseError
from pase.replay import align, estimate, load, measure, replay_graph
from pase.replay.graph import build_graph
from pase.replay.simulation.steady import evaluate
from pase.replay.types import COLLECTIVE, OPERATIONS, on_stream
from pase.schedule import (
    BucketPlan,
    ComputeBlock,
    Link,
    Message,
    Piece,
    ScheduleProblem,
    SendTime,
    Transfer,
    whole,
)
from pase.schedule.load import parse_link


def graph_of(run: ImaginedRun, folder: Path):  # type: ignore[no-untyped-def]
    t = align(load(write(simulate(run), folder)))
    m = measure(t)
    return t, estimate(m, m.steady())


def truth_ms(run: ImaginedRun) -> float:
    return float(np.median(np.array(simulate(run).iteration_us)[:, 1:])) / 1e3


def ms(g: Any) -> float:
    return max(evaluate(g).values()) / 1e6


@pytest.mark.parametrize("mib", [0.5, 8.0, 40.0])
@pytest.mark.parametrize("together", [2, 3, 6])
def test_fusing_meets_the_run_that_fuses(tmp_path: Path, mib: float, together: int) -> None:
    t, g = graph_of(bucketed(1, mib), tmp_path / "t")
    p = problem_from_timeline(t)
    every = range(0, 12, together)
    plan = BucketPlan(policy="fused", messages=tuple(whole(p, range(k, k + together)) for k in every))
    made = replan(g, p, plan)
    assert made.detail["messages"] == 12 // together
    assert ms(made.graph) == pytest.approx(truth_ms(bucketed(together, mib)), rel=0.02)


def test_cutting_meets_the_run_that_sends_parts(tmp_path: Path) -> None:
    """Buckets of two layers are cut into halves. Both halves still wait for the bucket's last gradient."""
    t, g = graph_of(bucketed(2), tmp_path / "t")
    p = problem_from_timeline(t)
    halves = []
    for k, tensor in enumerate(p.tensors):
        cut = tensor.nbytes // 2
        halves.append(Message(pieces=(Piece(tensor=k, offset=0, nbytes=cut),)))
        halves.append(Message(pieces=(Piece(tensor=k, offset=cut, nbytes=tensor.nbytes - cut),)))
    made = replan(g, p, BucketPlan(policy="parts", messages=tuple(halves)))
    assert made.detail["messages"] == 2 * len(p.tensors)
    # Each bucket has one more startup and gains nothing, because a stream sends one message at a time.
    assert ms(made.graph) > ms(g)
    sends = made.graph.kind == COLLECTIVE
    ours, theirs = made.graph.nbytes[sends].sum(), g.nbytes[g.kind == COLLECTIVE].sum()
    assert ours == theirs


@pytest.mark.parametrize("mib", [0.5, 8.0])
def test_the_runs_own_plan_changes_nothing(tmp_path: Path, mib: float) -> None:
    t, g = graph_of(bucketed(1, mib, noise=0.01), tmp_path / "t")
    p = problem_from_timeline(t)
    assert ms(replan(g, p, as_measured(p)).graph) == pytest.approx(ms(g), rel=0.01)


def test_messages_keep_their_order_and_wait_for_all_their_parts(tmp_path: Path) -> None:
    t, g = graph_of(bucketed(1), tmp_path / "t")
    p = problem_from_timeline(t)
    backwards = tuple(whole(p, [k]) for k in reversed(range(12)))
    made = replan(g, p, BucketPlan(policy="last first", messages=backwards)).graph
    r = replay_graph(made)
    sent = np.flatnonzero(made.kind == COLLECTIVE)
    for rank in made.ranks:
        mine = sent[made.rank[sent] == rank]
        assert (np.diff(r.start_ns[mine]) > 0).all()
        # The first message sent is the last to be ready, so all of them are exposed.
        assert (
            r.start_ns[mine].min()
            >= r.finish_ns[np.char.startswith(np.array(made.names)[made.name], "bwd_")].max()
        )


def test_a_policy_of_the_scheduler_and_its_control(tmp_path: Path) -> None:
    t, g = graph_of(bucketed(1, 1.0, collective_us=400.0), tmp_path / "t")
    found = {name: what_if_bucket_plan(t, g, name) for name in ("ours", "ddp")}
    assert ms(found["ours"].control) == pytest.approx(ms(g), rel=0.01)
    assert ms(found["ours"].graph) < ms(g) * 0.99
    assert ms(found["ours"].graph) <= ms(found["ddp"].graph) * 1.005
    with pytest.raises(PaseError, match="no scheduling policy 'magic'"):
        what_if_bucket_plan(t, g, "magic")
    with pytest.raises(PaseError, match="delays updates"):
        what_if_bucket_plan(t, g, "deft")


def test_collectives_on_the_stream_that_computes_are_not_moved(tmp_path: Path) -> None:
    """XLA's programs for the CPU run collectives and compute one after another on a single stream."""
    t, g = graph_of(bucketed(1), tmp_path / "t")
    p = problem_from_timeline(t)
    lanes = {g.rank[i]: g.device[i] for i in np.flatnonzero(g.kind == COLLECTIVE)}
    sends = g.kind == COLLECTIVE
    computes = on_stream(g.kind) & ~sends
    device = np.where(computes, [lanes[r] for r in g.rank], g.device)
    with pytest.raises(PaseError, match="shares a stream with compute") as e:
        replan(replace(g, device=device), p, as_measured(p))
    assert "rank 0" in e.value.where


@pytest.mark.parametrize(("reader", "moved"), [("elementwise_mul", True), ("ampere_gemm", False)])
def test_work_between_parts_goes_behind_the_message_where_it_may(reader: str, moved: bool) -> None:
    """Each sum is averaged on the compute stream before the next gradient is made. Fusing the sums would be a cycle."""
    send = {"device": (0, "20"), "kind": COLLECTIVE, "operation": OPERATIONS.index("all_reduce"), "ways": 2}
    names = ("make", reader, "make", reader)
    tasks: list[dict[str, object]] = [
        {"device": (0, "7"), "duration_ns": d, "name": n}
        for n, d in zip(names, (100.0, 10.0) * 2, strict=True)
    ]
    tasks += [{**send, "duration_ns": 50.0, "nbytes": 40, "name": "sum"} for _ in range(2)]
    g = build_graph(tasks, [(0, 1), (1, 2), (2, 3), (0, 4), (4, 1), (2, 5), (5, 3)])
    assert replay_graph(g).makespan_ns == 320
    link = Link(name="net", curve=SendTime.alpha_beta(alpha_s=10e-9, beta_s_per_byte=1e-9))
    p = ScheduleProblem(
        name="two",
        blocks=tuple(ComputeBlock(name=n, phase=n, seconds=1e-7) for n in ("forward", "backward")),  # type: ignore[arg-type]
        tensors=tuple(
            Transfer(name=f"{k} all_reduce", nbytes=40, ready_after=1, needed_before=0) for k in (0, 1)
        ),
        links=(link,),
    )
    plan = BucketPlan(policy="one", messages=(whole(p, [0, 1]),))
    if not moved:
        with pytest.raises(PaseError, match="elementwise") as e:
            replan(g, p, plan)
        assert e.value.where == f"'{reader}'"
        return
    made = replan(g, p, plan)
    assert made.detail["moved_behind"] == 1
    # Both gradients, then one message of 80 bytes, then both averages.
    assert replay_graph(made.graph).makespan_ns == pytest.approx(200 + 90 + 20)


def test_a_trace_without_sizes_takes_them_from_a_link(tmp_path: Path) -> None:
    t, g = graph_of(bucketed(1), tmp_path / "t")
    t.columns["nbytes"][:] = -1
    with pytest.raises(PaseError, match="no size") as e:
        what_if_bucket_plan(t, g, "ours")
    assert "--link" in e.value.fix
    run = bucketed(1)
    link = parse_link(f"net:{run.collective_us}us:{run.bandwidth_bytes_per_us / 1e3}GB/s")
    made = what_if_bucket_plan(t, g, "ours", (link,))
    assert ms(made.control) == pytest.approx(ms(g), rel=0.02)
