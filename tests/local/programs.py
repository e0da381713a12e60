"""Shared by the tests of local programs: a reduced model's plan and its local program."""

from bench.cases.plans import reduced
from pase.local.lower import program_of


def planned_program(model, strategy):
    case = reduced(model)
    plan = case.plan(strategy)
    return None if plan is None else (plan, program_of(case.problem.graph, plan.mesh, plan.strategy))
