"""Finds the best order and links of given messages exactly, with CP-SAT (extra `ortools`).

The model has one optional interval for each message and link. Intervals on one link do not overlap. An interval starts
when the message's tensors are ready, and the iteration is at least its end plus the compute that waits for it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.errors import PaseError, install_line
from pase.schedule.chain import plain_iteration_s
from pase.schedule.plan import BucketPlan
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import plain_view

__all__ = ["best_order"]

TICKS = 10_000_000
"""Number of ticks in the given plan's iteration, which makes the resolution 1e-7 of it."""


def best_order(
    problem: ScheduleProblem, plan: BucketPlan, *, time_limit_s: float = 10.0, seed: int = 0
) -> tuple[BucketPlan, float]:
    """Returns (the plan with the same messages in the best order and on the best links, lower bound for such plans)."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as e:
        raise PaseError(
            "the package ortools is not installed", where="CP-SAT", fix=f"run {install_line('ortools')}"
        ) from e
    view = plain_view(problem)
    tick = plain_iteration_s(problem, plan, view) / TICKS
    model = cp_model.CpModel()
    makespan = model.new_int_var(int(view.compute / tick), 2 * TICKS, "makespan")
    rows: list[list[cp_model.IntervalVar]] = [[] for _ in problem.links]
    starts, chosen = [], []
    for m, message in enumerate(plan.messages):
        tensors = [p.tensor for p in message.pieces]
        ready = int(max(view.ready[t] for t in tensors) / tick)
        tail = int(max(view.tail[t] for t in tensors) / tick)
        start = model.new_int_var(ready, 2 * TICKS, f"start {m}")
        on = {}
        for k in problem.links_for(tensors[0]):
            seconds = int(problem.message_s(k, tensors[0], message.nbytes) / tick)
            on[k] = model.new_bool_var(f"{m} on {k}")
            rows[k].append(model.new_optional_fixed_size_interval_var(start, seconds, on[k], f"{m} {k}"))
            model.add(start + seconds + tail <= makespan).only_enforce_if(on[k])
        model.add_exactly_one(on.values())
        starts.append(start)
        chosen.append(on)
    for row in rows:
        model.add_no_overlap(row)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return plan, view.compute
    order = np.argsort([solver.value(s) for s in starts], kind="stable")
    messages = tuple(
        replace(plan.messages[m], link=next(k for k, b in chosen[m].items() if solver.value(b)))
        for m in order
    )
    return replace(plan, messages=messages, dispatch="sequence"), solver.best_objective_bound * tick
