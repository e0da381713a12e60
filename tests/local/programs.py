"""Shared by the tests of local programs: a reduced model's plan and its program, and a graph run on one device."""

from collections.abc import Mapping

import numpy as np

from bench.cases.plans import reduced
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.ir import Graph
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program, program_of
from pase.machine import mesh_from
from pase.tables.layouts import configs


def planned_program(model, strategy):
    case = reduced(model)
    plan = case.plan(strategy)
    return None if plan is None else (plan, program_of(case.problem.graph, plan.mesh, plan.strategy))


def unsplit(
    graph: Graph, given: Mapping[str, np.ndarray], tensor: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """``loss_and_gradients`` of a raw graph on one device, by the graph alone. given: values by path. Gradients are by
    path too."""
    graph = SplitProblem.of(graph, 1, machine.load("h100x8"), "analytic", "adam").graph
    mesh = mesh_from("1", 1)
    program = local_program(graph, mesh, {n.name: configs(n, mesh)[0] for n in graph.nodes})
    leaves = {t.name: given[t.path] for t in graph.tensors.values() if t.path in given}
    value, grads = loss_and_gradients(program, graph, leaves, tensor)
    return value, {graph.tensors[t].path: g for t, g in grads.items()}
