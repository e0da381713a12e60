"""Our bucket plans against every policy, the exact optimum and the bounds.

    python -m bench schedule.policies [--quick] [--only TEXT]

The instances are random or measured. Seconds are CPU seconds of this process (the machine may be shared). Writes
bench/results/schedule_policies.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from functools import cache
from typing import Any

from bench.cases.schedules import BETA, PROFILES, link, profile, random_problem, vgg19
from bench.runner import Benchmark, option
from pase.schedule import Options, all_policies, evaluate, get_policy
from pase.schedule.bound import lower_bound_s, preemptive_bound_s
from pase.schedule.chain import plain_iteration_s
from pase.schedule.exact import exact_plan
from pase.schedule.fast import fast_plan
from pase.schedule.types import ScheduleProblem

BANDWIDTHS = (5e9, 1e9, 2.5e8)


def one(problem: ScheduleProblem, exact_up_to: int) -> dict[str, Any]:
    """Returns a row: each policy's period over ours, the bound, and the exact optimum if the problem is small."""
    seconds = float("inf")
    for _ in range(3):  # the least of three: other work on the machine only adds time
        began = time.process_time()
        plan, cost, bound = fast_plan(problem)
        seconds = min(seconds, time.process_time() - began)
    others = {}
    for name, policy in all_policies().items():
        if policy.delays or name == "ours":
            continue
        others[name] = plain_iteration_s(problem, policy.make(problem, Options()))
    row: dict[str, Any] = {
        "problem": problem.name,
        "tensors": len(problem.tensors),
        "links": len(problem.links),
        "ours_s": cost,
        "bound_s": bound,
        "gap_to_bound": cost / bound - 1,
        "gap_to_preemptive": cost / preemptive_bound_s(problem) - 1,
        "messages": len(plan.messages),
        "cpu_seconds": seconds,
        "over_ours": {k: v / cost for k, v in others.items()},
        "worse_than": [k for k, v in others.items() if v < cost * (1 - 1e-7)],
    }
    n, loose = len(problem.tensors), cost > 1.03 * preemptive_bound_s(problem)
    if (n <= exact_up_to or (n <= 30 and loose)) and cost > bound * (1 + 1e-6):
        exact = exact_plan(problem, plan, bound_s=bound, time_limit_s=60 if n <= exact_up_to else 240)
        row["exact"] = {"s": exact.iteration_s, "bound_s": exact.bound_s, "proven": exact.proven}
        row["gap_to_exact"] = cost / exact.iteration_s - 1
    return row


@cache
def large_plan() -> dict[str, Any]:
    """Returns the CPU seconds from a 405B-parameter model's plan on 512 devices to its bucket plan, including the time
    to build the problem. The third of three runs counts, because the kernels are compiled by then."""
    import pase
    from pase.plan.buckets import scheduled

    plan = pase.compile(
        "zoo:llama3_405b", devices=512, mesh="64x8", memory_limit="none", baselines=False, overlap="none"
    )
    seconds = []
    for _ in range(3):
        began = time.process_time()
        made = scheduled(plan)
        seconds.append(time.process_time() - began)
    assert made is not None
    problem, buckets = made
    e = evaluate(problem, buckets)
    return {
        "mesh": "64x8",
        "tensors": len(problem.tensors),
        "messages": len(buckets.messages),
        "links": [link.name for link in problem.links],
        "iteration_s": e.iteration_s,
        "gap_to_bound": e.iteration_s / lower_bound_s(problem) - 1,
        "cpu_seconds": seconds[-1],
        "cpu_seconds_each": seconds,
    }


def problems(given: Namespace) -> dict[str, ScheduleProblem]:
    """Returns random problems, and those of recorded profiles if there are any."""
    found = [
        random_problem(n, s) for n in (6, 8, 12, 30, 100, 500, 2000) for s in range(3 if given.quick else 6)
    ]
    found += [random_problem(n, s, links=2) for n in (4, 20, 200) for s in range(3)]
    for path in sorted(PROFILES.glob("*.graph.txt")):
        for b in BANDWIDTHS:
            net = link(f"{b / 1e9:g} GB/s", alpha_s=50e-6, beta=1 / b)
            found.append(profile(path.name.removesuffix(".graph.txt"), net))
    return {p.name: p for p in found}


@cache
def deft() -> dict[str, Any]:
    """Returns the iteration time of VGG-19 under several policies, on DeFT's links."""
    found = {}
    first, second = link("nccl", beta=BETA), link("gloo", beta=BETA * 1.65)
    for name, links in (("one link", (first,)), ("two links", (first, second))):
        problem = vgg19(*links)
        ways = {"ddp": (0,), "bytescheduler": (0,), "us_byte": (0,), "ours": (0, 2), "deft": (4,)}
        for policy, staleness in ((p, s) for p, each in ways.items() for s in each):
            e = evaluate(problem, get_policy(policy).make(problem, Options(staleness=staleness)))
            found[f"{name}, {policy}, staleness {staleness}"] = {
                "iteration_ms": e.iteration_s * 1e3,
                "updates_per_iteration": e.updates_per_iteration,
            }
    return found


def summary(rows: list[dict[str, Any]], given: Namespace) -> dict[str, Any]:
    """Returns the largest gaps and times; without ``--only``, also the plan of a large model and DeFT's example."""
    large = [r["cpu_seconds"] for r in rows if r["tensors"] == 2000]
    known = [r["gap_to_exact"] for r in rows if r.get("exact", {}).get("proven")]
    unknown = [r for r in rows if not r.get("exact", {}).get("proven") and r["gap_to_bound"] > 1e-6]
    return {
        "median_cpu_seconds_2000_tensors": statistics.median(large) if large else None,
        "most_cpu_seconds_2000_tensors": max(large, default=None),
        "plan_405b": None if given.only else large_plan(),
        "largest_gap_to_proven_optimum": max(known, default=None),
        "proven": len(known),
        "largest_gap_to_preemptive_where_not_proven": max(
            (r["gap_to_preemptive"] for r in unknown), default=None
        ),
        "worse_than_some_policy": [r["problem"] for r in rows if r["worse_than"]],
        "vgg19_deft": {} if given.only else deft(),
    }


BENCH = Benchmark(
    "schedule_policies",
    problems,
    lambda problem, given: one(problem, 8 if given.quick else 12),
    named="{problem}",
    head=summary,
    options=[option("--quick", action="store_true", help="fewer seeds, exact solvers on smaller problems")],
    prepare=lambda: fast_plan(random_problem(20, 99)),  # compiles the kernels
)
