"""Shared by the tests of local programs: a reduced model's plan and program, a graph on one device, and messages."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bench.cases.plans import reduced
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.ir import Graph
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program, program_of
from pase.local.messages import JOINED
from pase.local.types import LocalMessage, MessageChunk
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


def chunks_of(program, way):
    """A whole chunk of each step that a message can carry, stage after stage."""
    return [
        MessageChunk(transfer=k, stage=stage, begin=0, nbytes=step.nbytes)
        for k, t in enumerate(program.transfers)
        if t.src in program.parameters
        for stage, step in enumerate(program.stages(k, way))
    ]


def _message(way, chunks):
    return LocalMessage(way=way, link="", chunks=tuple(chunks))


def _alike(program, way, chunks):
    """Chunks that one collective can carry, stage after stage."""
    found = {}
    for c in chunks:
        step, (reader, *_) = program.stages(c.transfer, way)[c.stage], program.users(c.transfer)
        runs = program.runs(c.transfer, way), reader.op.loops
        alone = c if step.kind not in JOINED else None
        found.setdefault((c.stage, step.kind, step.axes, runs, alone), []).append(c)
    return [some for (stage, *_), some in sorted(found.items(), key=lambda item: item[0][0])]


def apart(program, way, chunks):
    """A message for each chunk."""
    return [_message(way, [c]) for c in chunks]


def joined(program, way, chunks):
    """A message for all chunks that one collective can carry."""
    return [_message(way, some) for some in _alike(program, way, chunks)]


def cut(program, way, chunks):
    """Two of them, the first with the ends of all tensors and the second with their begins."""
    made = []
    for some in _alike(program, way, chunks):
        joins = program.stages(some[0].transfer, way)[some[0].stage].kind in JOINED
        at = [c.nbytes // 64 * 16 * joins for c in some]
        ends = [replace(c, begin=n, nbytes=c.nbytes - n) for c, n in zip(some, at, strict=True)]
        begins = [replace(c, nbytes=n) for c, n in zip(some, at, strict=True) if n]
        made += [_message(way, m) for m in (ends, begins) if m]
    return made
