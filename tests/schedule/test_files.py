"""Files of scheduling problems and bucket plans: JSON, PipeDream profiles, layouts, and settings of other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cases.schedules import link, profile, random_problem, vgg19
from pase.errors import PaseError
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.plan.communication import communication_problem
from pase.plan.types import NodePlan, PlanData, TensorPlan
from pase.schedule import Options, evaluate, get_policy, problem_from_times
from pase.schedule.emit import ddp_caps_mb, pgle_text, xla_flags
from pase.schedule.io import plan_from_json, plan_to_json, problem_from_json, problem_to_json
from pase.schedule.load import parse_link
from pase.schedule.pipedream import read_pipedream
from pase.schedule.policies.tictac import parameter_server
from pase.schedule.types import AxisGroup, ComputeBlock, Link, ScheduleProblem, SendTime, Transfer
from pase.tables.itemize import Collective, NodeCost
from tests.schedule.profiles import PROFILE

NET = (link("net", alpha_s=1e-4, beta=1e-9),)


# --- problems and plans as JSON --------------------------------------------------------------------------------


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


def test_times_outside_the_iteration_are_named() -> None:
    with pytest.raises(PaseError) as e:
        problem_from_times(name="x", forward_s=1.0, backward_s=2.0, tensors=[("a", 1, 9.0, 0.0)], links=NET)
    assert "'a'" in e.value.where and "ready_s is 9.0" in e.value.what


# --- profiles and layouts --------------------------------------------------------------------------------------


def test_a_pipedream_profile() -> None:
    p = read_pipedream(PROFILE, NET, name="p")
    assert [b.seconds for b in p.blocks] == pytest.approx([2e-3, 1e-3, 1.5e-3, 1e-3, 2e-3, 3e-3])
    assert [(t.name, t.nbytes, t.ready_after, t.needed_before) for t in p.tensors] == [
        ("node1", 4_000_000, 5, 0),
        ("node3", 8_000_000, 3, 2),
    ]
    flow = read_pipedream(PROFILE, NET, name="p", dataflow=True)
    assert [b.after for b in flow.blocks] == [(), (0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("\tnode2 -- node3", "\tnode2 -- node9", "p, line 5", "'node9'"),
        ("\tnode2 -- node3", "\tnode3 -- node1", "p", "cycle"),
        ("parameter_size=8000000.000", "parameter_size=big", "p, line 3", "parameter_size"),
        ("forward_compute_time=2.000", "forward_compute_time=-2.000", "p, line 2", "-2.0"),
        ("node3 -- Linear", "node1 -- Linear", "p, line 3", "'node1'"),
        ("node2 -- ReLU(inplace) --", "hello", "p, line 1", "hello"),
    ],
)
def test_bad_profiles_are_named(old: str, new: str, where: str, what: str) -> None:
    text = PROFILE.replace(old, new)
    if new == "\tnode3 -- node1":
        text += "\tnode2 -- node3\n"
    with pytest.raises(PaseError) as e:
        read_pipedream(text, NET, name="p")
    assert e.value.where == where and what in e.value.what


@pytest.mark.data("traces/pipedream_profiles")
@pytest.mark.parametrize(
    ("name", "tensors", "megabytes"),
    [("resnet50", 107, 102), ("vgg16", 16, 553), ("gnmt", 11, 775), ("alexnet", 8, 244)],
)
def test_the_shared_profiles(name: str, tensors: int, megabytes: int) -> None:
    p = profile(name)
    assert len(p.tensors) == tensors
    assert round(p.nbytes / 1e6) == megabytes
    assert p.is_plain
    assert profile(name, dataflow=True).dataflow


def stepped(**changes: Any) -> PlanData:
    """A plan of two repeated layers. w is gathered over `a` for forward and for backward; its gradient is
    reduce-scattered over `a` and all-reduced over `b`."""

    def move(
        kind: Any, tensor: str, axes: str, nbytes: int, times: int, phase: Any, source: str
    ) -> Collective:
        cost = times * (1.0 + nbytes / 8)
        return Collective(
            kind=kind,
            tensor=tensor,
            axes=tuple(axes),
            nbytes=nbytes,
            times=times,
            phase=phase,
            node="dot",
            source=source,
            cost=cost,
        )

    def node(name: str, op: str, times: int, compute: float, update: float = 0.0) -> NodePlan:
        cost = NodeCost(compute=compute, communication=0.0, update=update)
        return NodePlan(name=name, op=op, einsum="", sizes={}, split={}, times=times, source="", cost=cost)

    memory = Memory(parameters=0, gradients=0, optimizer=0, activations=0, buffers=0)
    plan = PlanData(
        model="toy",
        devices=8,
        machine="",
        machine_digest="",
        device_memory=0,
        cost_model="analytic",
        unit="s",
        optimizer="adam",
        mesh=Mesh(names=("a", "b"), sizes=(4, 2)),
        parameters={},
        inputs={},
        define={},
        read={},
        memory=memory,
        cost=0.0,
        optimal=True,
        bound=0.0,
        baselines={},
        skipped={},
        tried=(),
        seconds={},
        graph_digest="",
        provenance={},
        nodes=(
            node("w", "parameter", 1, 0.0, 4.0),
            node("dot", "matmul", 2, 6.0),
            node("loss", "map", 1, 3.0),
        ),
        collectives=(
            move("all_gather", "t1", "a", 8, 4, "forward", "w"),
            move("reduce_scatter", "t1", "a", 8, 2, "backward", "w"),
            move("all_reduce", "t1", "b", 2, 2, "backward", "w"),
            move("all_reduce", "t2", "b", 16, 2, "forward", "x"),
        ),
    )
    return replace(plan, **changes)


def test_a_layout() -> None:
    p = communication_problem(stepped(), where="toy")
    # The seconds of each dot: a third of 3 s in forward, its share of the update, and the activation's all-reduce,
    # which overlaps nothing.
    assert [b.seconds for b in p.blocks] == [1 + 2 + 3, 1 + 2 + 3, 1, 2, 2, 2]
    names = [t.name for t in p.tensors]
    assert names[:4] == [
        "w[0].grad.reduce_scatter",
        "w[0].grad.all_reduce.1",
        "w[0].all_gather",
        "w[0].all_gather.again1",
    ]
    scatter, reduce, gather, again = p.tensors[:4]
    assert (scatter.ready_after, reduce.follows, gather.follows, gather.needed_before, gather.lag) == (
        5,
        (0,),
        (1,),
        0,
        1,
    )
    assert (again.lag, again.ready_after, again.needed_before) == (0, 0, 5)
    assert p.message_s(0, 0, 8) == 2.0
    for name in ("fifo", "ddp", "bytescheduler", "tac", "ours"):
        plan = get_policy(name).make(p, Options())
        assert evaluate(p, plan).iteration_s >= p.compute_s


def test_stages_of_a_layout_follow_one_another() -> None:
    """A gather runs axis by axis, for forward and for backward. Each step takes the result of the one before it."""
    gather, *rest = stepped().collectives
    moved = (gather, replace(gather, axes=("b",), nbytes=16), *rest)
    w = TensorPlan(shape=(), dtype="bfloat16", storage=())
    p = communication_problem(stepped(collectives=moved, parameters={"w": w}), where="toy")
    by_name = {t.name: i for i, t in enumerate(p.tensors)}
    for later, earlier in (
        ("w[0].all_gather.1", "w[0].all_gather"),
        ("w[0].all_gather", "w[0].grad.all_reduce.1"),
        ("w[0].all_gather.1.again1", "w[0].all_gather.again1"),
    ):
        assert p.tensors[by_name[later]].follows == (by_name[earlier],)
    assert {t.dtype for t in p.tensors} == {"bfloat16"}


def test_messages_do_not_wait_for_each_other_in_a_circle() -> None:
    """Two steps of one kind over the same axes, and two parameters whose steps are swapped, fused if possible."""
    net = link("net", alpha_s=1.0, beta=0.0)
    blocks = (
        ComputeBlock(name="f", phase="forward", seconds=1.0),
        ComputeBlock(name="b", phase="backward", seconds=1.0),
    )

    def tensor(name: str, kind: str, follows: tuple[int, ...]) -> Transfer:
        after = None if follows else 1
        return Transfer(name=name, nbytes=8, ready_after=after, needed_before=0, kind=kind, follows=follows)

    for kinds in (("permute", "permute"), ("permute", "all_gather")):
        one, other = kinds
        tensors = (
            tensor("w1", one, ()),
            tensor("w2", other, (0,)),
            tensor("v1", other, ()),
            tensor("v2", one, (2,)),
        )
        p = ScheduleProblem(name="circle", blocks=blocks, tensors=tensors, links=(net,))
        for name in ("ddp", "horovod", "ours", "fifo", "tac"):
            e = evaluate(p, get_policy(name).make(p, Options()))
            assert e.iteration_s >= 2 + 2  # at least two messages, one after the other
        assert evaluate(p, get_policy("ours").make(p, Options())).messages < 4 or one != other


def test_bad_layouts_are_named() -> None:
    with pytest.raises(PaseError, match="FLOP") as e:
        communication_problem(stepped(unit="FLOP"), where="l.json")
    assert e.value.where == "l.json"
    with pytest.raises(PaseError, match="nothing to schedule") as e:
        communication_problem(stepped(collectives=stepped().collectives[3:]), where="l.json")
    assert e.value.where == "l.json"


def test_links_on_the_command_line(tmp_path: Path) -> None:
    assert parse_link("n:2ms:8Gbit/s").curve.seconds_for(1_000_000) == pytest.approx(3e-3)
    table = tmp_path / "t.csv"
    table.write_text("bytes,seconds\n100,1.0\n200,3.0\n")
    assert parse_link(f"n:{table}").curve.seconds_for(150) == 2.0
    for bad in ("n", "n:5:1GB/s", "n:5us:0GB/s", "n:5us:fast"):
        with pytest.raises(PaseError, match="--link"):
            parse_link(bad)


# --- emitters --------------------------------------------------------------------------------------------------


def test_emitters() -> None:
    problem = vgg19()
    plan = get_policy("fifo").make(problem, Options())
    largest = max(t.nbytes for t in problem.tensors)
    assert xla_flags(problem, plan)[0] == f"--xla_gpu_all_reduce_combine_threshold_bytes={largest}"
    lines = pgle_text(problem, plan).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith('costs { name: "all-reduce-start" cost_us: 8651.0')
    assert lines[1].startswith('costs { name: "all-reduce-start.1" cost_us: 31754.0')
    assert ddp_caps_mb(problem, plan)[0] == pytest.approx(problem.tensors[5].nbytes / 2**20, abs=1e-3)


def test_a_profile_cannot_command_the_terminal() -> None:
    with pytest.raises(PaseError, match="control character") as e:
        read_pipedream(PROFILE.replace("node3", "node3\x1b[2J", 1), (), name="p")
    assert e.value.where == "p, line 3"
