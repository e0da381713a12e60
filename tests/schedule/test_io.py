"""Scheduling problems and bucket plans as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.cases.schedules import link, random_problem, vgg19
from pase.errors import PaseError
from pase.schedule import Options, evaluate, get_policy
from pase.schedule.io import plan_from_json, plan_to_json, problem_from_json, problem_to_json
from pase.schedule.policies.tictac import parameter_server
from pase.schedule.types import AxisGroup, Link, SendTime


def test_problems_come_back_as_they_went() -> None:
    table = Link(
        name="t",
        curve=SendTime.table([1, 5], [2.0, 3.0]),
        by_axes={AxisGroup(("m",)): SendTime.table([4], [1.0])},
        axes=(AxisGroup(), AxisGroup(("m",))),
    )
    server = parameter_server(random_problem(4, 1), push=link("up"), pull=link("down"))
    for problem in (vgg19(), random_problem(5, 1, links=2), server, vgg19(table)):
        text = json.dumps(problem_to_json(problem))
        assert problem_from_json(json.loads(text)) == problem


@pytest.mark.parametrize("policy", ["ours", "deft", "horovod", "us_byte"])
def test_plans_come_back_as_they_went(policy: str) -> None:
    problem = vgg19()
    plan = get_policy(policy).make(problem, Options(staleness=4))
    text = json.dumps(plan_to_json(problem, plan))
    assert plan_from_json(json.loads(text), problem) == plan


def test_a_problem_given_by_times() -> None:
    data = {
        "schema": "pase.schedule.problem/1",
        "name": "times",
        "forward_s": 2.0,
        "backward_s": 4.0,
        "tensors": [
            {"name": "a", "bytes": 8, "ready_s": 6.0, "next_use_s": 0.0},
            {"name": "b", "bytes": 8, "ready_s": 4.0, "next_use_s": 1.0},
        ],
        "links": [{"name": "net", "curve": {"alpha_s": 0.0, "beta_s_per_byte": 0.125}}],
    }
    problem = problem_from_json(data)
    assert problem.compute_s == 6.0 and problem.is_plain
    # b is sent from 4 to 5 and a from 6 to 7. Then forward takes 2 s.
    assert evaluate(problem, get_policy("fifo").make(problem, Options())).iteration_s == 4 + 1 + 2


def good() -> dict[str, Any]:
    return problem_to_json(random_problem(2, 0))


def broken(path: list[Any], value: Any) -> dict[str, Any]:
    data: Any = good()
    spot = data
    for p in path[:-1]:
        spot = spot[p]
    spot[path[-1]] = value
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        ([], "", "list"),
        (broken(["schema"], "pase.schedule.problem/9"), "", "'pase.schedule.problem/9'"),
        (broken(["blocks", 0, "seconds"], -1.0), "at blocks/0/seconds", "-1.0"),
        (broken(["blocks", 0, "seconds"], float("nan")), "at blocks/0/seconds", "nan"),
        (broken(["tensors", 1, "ready_after"], 99), "tensors[1] 'w1'", "ready_after is 99"),
        (broken(["tensors", 1, "bytes"], 0), "at tensors/1/bytes", "0"),
        (broken(["tensors", 0, "lag"], 0), "tensors[0] 'w0'", "never start"),
        (broken(["tensors", 0, "follows"], [1]), "tensors[0] 'w0'", "follows tensor 1"),
        (broken(["links", 0, "axes"], ["model"]), "tensors[0] 'w0'", "axes ''"),
        (broken(["links"], []), "at links", ""),
        (broken(["links", 0, "curve"], {"bytes": [2, 2], "seconds": [1.0, 1.0]}), "cost curve", "[2.0, 2.0]"),
        (broken(["links", 0, "curve"], {"bytes": [2], "seconds": [1.0, 1.0]}), "cost curve", "2 seconds"),
        (broken(["tensors", 0, "ready_s"], 1.0), "tensors/0 'w0'", "blocks"),
        (broken(["colour"], "red"), "at colour", ""),
        (broken(["links", 0, "curve"], {"alpha_s": 1.0}), "cost curve", "one form"),
        (
            broken(
                ["links", 0, "curve"], {"alpha_s": 1.0, "beta_s_per_byte": 1.0, "bytes": [1], "seconds": [1]}
            ),
            "cost curve",
            "one form",
        ),
        (broken(["forward_s"], 1.0), "problem", "forward_s"),
    ],
)
def test_bad_problems_are_named(data: Any, where: str, what: str) -> None:
    with pytest.raises(PaseError) as e:
        problem_from_json(data, where="x.json")
    fault = f"{e.value.where}: {e.value.what}"  # an error of a form has the place within the file in `what`
    assert fault.startswith("x.json: ") and where in fault and what in fault


def test_bad_plans_are_named() -> None:
    problem = vgg19()
    data = plan_to_json(problem, get_policy("fifo").make(problem, Options()))
    data["messages"][0]["pieces"][0]["tensor"] = "bucket 9"
    with pytest.raises(PaseError) as e:
        plan_from_json(data, problem, where="b.json")
    assert e.value.where == "b.json, at messages/0" and "'bucket 9'" in e.value.what
    data = plan_to_json(problem, get_policy("fifo").make(problem, Options()))
    del data["messages"][2]
    with pytest.raises(PaseError) as e:
        plan_from_json(data, problem, where="b.json")
    assert e.value.where.startswith("b.json: plan 'fifo'") and "'bucket 4'" in e.value.what
