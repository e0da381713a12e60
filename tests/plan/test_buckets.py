"""A plan's bucket plan: its links come from the machine's levels, layout.json keeps it, and it predicts a step."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pase
from pase import machine
from pase.api import Plan
from pase.errors import Infeasible, PaseError
from pase.plan import buckets
from pase.plan.layout import from_json, to_json
from pase.replay import load
from pase.replay.traces.timeline_io import save_timeline
from pase.schedule import Options, check_plan, evaluate, get_policy


@cache
def plan() -> Plan:
    return pase.compile("zoo:alexnet?batch=256", devices=16, mesh="2x8", baselines=False)


def test_a_plans_problem_has_its_machines_links() -> None:
    problem = buckets.problem_of(plan())
    names = {level.name for level in machine.load("h100x8").levels}
    assert {link.name for link in problem.links} <= names
    assert plan().bucket_problem == problem
    made = plan().bucket_plan
    assert made is not None and made.dispatch == "sequence"
    check_plan(problem, made)


@pytest.mark.parametrize("policy", ["ddp", "ours"])
def test_it_is_kept_in_the_layout(tmp_path: Path, policy: str) -> None:
    chosen = plan().scheduled(policy)
    chosen.save(tmp_path / "layout.json")
    again = pase.load(tmp_path / "layout.json")
    assert again.bucket_plan == chosen.bucket_plan and again.bucket_plan is not None
    assert again.bucket_plan.policy == policy
    assert again.bucket_problem is not None and chosen.bucket_problem is not None
    assert again.bucket_problem.links == chosen.bucket_problem.links
    assert to_json(again) == to_json(chosen)
    kept = json.loads((tmp_path / "layout.json").read_text())["bucket_plan"]
    e = evaluate(again.bucket_problem, again.bucket_plan)
    assert kept["evaluation"]["iteration_s"] == pytest.approx(e.iteration_s, rel=1e-9)


def test_a_plan_without_one_has_ours() -> None:
    assert plan().buckets is None and "bucket_plan" not in to_json(plan())
    assert plan().bucket_plan == plan().scheduled().bucket_plan


def test_without_the_machine_the_kept_links_are_used() -> None:
    data = to_json(plan().scheduled())
    data["machine"]["name"] = "one that nobody has"
    away = Plan.of(from_json(data))
    assert buckets.curves_of(away) is None
    assert away.bucket_plan == plan().bucket_plan


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d["messages"].pop(), "every byte must be sent|bytes of tensor"),
        (lambda d: d["messages"][0].update(link="tape"), "no link 'tape'"),
        (lambda d: d.update(schema="pase.schedule.bucket_plan/7"), "this version of pase reads"),
        (lambda d: d["messages"][0]["pieces"][0].update(tensor="w9"), "no tensor 'w9'"),
        (lambda d: d["link_costs"][0]["curve"].update(seconds=[-1.0]), "bucket_plan: at link_costs/0/curve"),
    ],
)
def test_a_bad_one_is_named(spoil: Any, message: str) -> None:
    data = to_json(plan().scheduled())
    spoil(data["bucket_plan"])
    with pytest.raises(PaseError, match=message) as e:
        from_json(data, "x.json")
    assert "x.json: at bucket_plan" in str(e.value)


def test_the_predicted_step_is_a_timeline(tmp_path: Path) -> None:
    t = plan().timeline
    problem, made = plan().bucket_problem, plan().bucket_plan
    assert t is not None and problem is not None and made is not None
    save_timeline(t, tmp_path / "step.json")
    back = load(tmp_path / "step.json")
    events = list(back)
    e = evaluate(problem, made)
    (mark,) = back.marks
    assert mark.end_ns - mark.start_ns == pytest.approx(e.iteration_s * 1e9, abs=1)
    assert {x.lane for x in events} == {"compute", "memory", *(link.name for link in problem.links)}
    sent = [x for x in events if x.kind == "collective"]
    assert sum(x.duration_ns for x in sent) == pytest.approx(
        sum(e.link_busy_s.values()) * 1e9, abs=len(events)
    )
    assert sum(x.duration_ns for x in events if x.kind == "kernel") == pytest.approx(
        problem.compute_s * 1e9, abs=len(events)
    )
    assert {x.nbytes for x in sent} == {m.nbytes for m in made.messages}
    assert {x.operation for x in sent} <= {"all_reduce", "reduce_scatter", "all_gather"}
    for a, b in itertools.pairwise(events):
        assert a.lane != b.lane or a.start_ns + a.duration_ns <= b.start_ns


def test_nothing_to_send_is_no_bucket_plan() -> None:
    alone = pase.compile("zoo:mlp?batch=64", devices=1, baselines=False)
    assert alone.bucket_plan is None and alone.timeline is None and alone.scheduled() is alone


def test_a_million_runs_are_not_listed() -> None:
    data = to_json(plan())
    data["strategy"][3]["times"] = 10**30
    with pytest.raises(Infeasible, match=r"run 1000000000000.* times") as e:
        buckets.problem_of(Plan.of(from_json(data)))
    assert e.value.where.startswith("the plan for 'zoo:alexnet")


def test_delayed_updates_where_they_are_allowed() -> None:
    chosen = plan().scheduled("ours", Options(staleness=2))
    assert chosen.bucket_plan is not None and chosen.bucket_plan.staleness <= 2
    assert Plan.of(from_json(to_json(chosen))).bucket_plan == chosen.bucket_plan


@pytest.mark.parametrize("model", ["zoo:gpt2?layers=2&vocab=2048", "zoo:mixtral_8x7b?layers=2"])
def test_a_schedule_counts_compute_and_what_is_exposed_as_the_plan_does(model: str) -> None:
    made = pase.compile(model, devices=8, baselines=False)
    problem = buckets.problem_of(made)
    e = evaluate(problem, get_policy("ours").make(problem, Options()))
    assert made.exposed > 0 and problem.held_s > 0
    assert e.compute_s == pytest.approx(made.compute, rel=1e-9)
    assert e.bubble_s == pytest.approx(e.iteration_s - made.compute, rel=1e-9)
    assert problem.held_s <= e.exposed_s <= e.bubble_s * (1 + 1e-9)
