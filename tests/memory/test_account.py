"""The account of memory, node by node, and its profile for any configs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import pase
from pase import zoo
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, Node
from pase.ir.types import WORKLESS
from pase.machine import Mesh, mesh_from
from pase.memory.account import in_flight, in_flight_at_least, memory, profile
from pase.tables.axis_layout import PARTIAL, REPLICATED, forward_states, gradient_states
from pase.tables.itemize import collectives
from pase.tables.layouts import local_bytes, read_rule, write_rule
from tests.compiler.meshes.models import MODEL
from tests.memory.programs import jax_loop, residual_bytes


@pytest.mark.some(1)
@pytest.mark.parametrize("more", ["", "&scan=0&remat=1"], ids=["loop", "regions"])
def test_the_profile_is_the_plans_own_account(more):
    """For any configs, the profile's peak is the memory that the plan reports, without buffers.

    This also holds if layers are separate regions, and a node keeps one part in its region and another throughout.
    """
    problem = SplitProblem.of(resolve(MODEL + more).graph, 4, None, "analytic", "adam")
    mesh = mesh_from("2x2", 4)
    _, space = problem.tables(mesh)
    p = profile(problem.graph, mesh, space.configs, float("inf"))
    assert (len(p.bytes) > len(problem.graph.nodes)) == bool(more)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(problem.graph.nodes, space.configs, choice, strict=True)}
        moved = collectives(problem.graph, mesh, configs, problem.model)
        account = memory(problem.graph, mesh, configs)
        assert p.usage(choice).max() == pytest.approx(account.total - account.buffers, abs=8)
        flight = [flying(problem.graph, n, configs, mesh) for n in problem.graph.nodes]
        assert list(in_flight(problem.graph, configs, mesh).values()) == pytest.approx(flight)
        assert account.buffers == round(max(*flight, *(c.nbytes for c in moved)))


def written_over(graph: Graph, n: Node) -> dict[str, str]:
    """Return result of a node -> the operand whose array it takes over."""
    of: dict[str, list[str]] = {}
    for op in n.ops:
        for made in (a.tensor for a in op.writes if op.kind in ("elementwise", "view", "copy")):
            nbytes = graph.tensors[made].nbytes
            same = [a.tensor for a in op.reads if graph.tensors[a.tensor].nbytes == nbytes]
            of[made] = [x for t in same for x in (t, *of.get(t, ()))]
    places: dict[str, str] = {}
    for t, operands in of.items():
        mine = [
            x
            for x in operands
            if graph.producer.get(x, n) is not n
            and graph.producer[x].kind != "parameter"
            and not graph.read_outside(n, x)
            and x not in places.values()
        ]
        if mine and (t not in n.internal or graph.read_outside(n, t)):
            places[t] = mine[0]
    return places


def flying(graph: Graph, n: Node, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Compute ``in_flight`` for one node: the tensors that it reads and makes, each once.

    A parameter counts if it is read in another layout than it is stored in. Its gradient counts if its layout differs
    from the stored one. What elementwise ops make from an operand that only this node reads takes over its array.
    """
    seen, out = set(), 0.0
    over = written_over(graph, n)
    for op in () if n.kind == "parameter" or n.kind in WORKLESS else n.ops:
        for a in (*op.writes, *op.reads):
            source = graph.producer.get(a.tensor)
            inner = a.tensor in n.internal and not graph.read_outside(n, a.tensor)
            if (
                source is None
                or inner
                or a.tensor in seen
                or (a.sparse and source is not n)
                or a.tensor in over
            ):
                continue
            seen.add(a.tensor)
            t, cfg = graph.tensors[a.tensor], configs[n.name][None]
            local = float(local_bytes(n, t, a, cfg, mesh)[0])
            if source.kind != "parameter":
                out += local
                continue
            written = write_rule(source, *source.write_of(t.name)).states(configs[source.name][None], mesh)
            read = read_rule(n, op, a).states(cfg, mesh)
            moved = (forward_states(written) != np.where(read == PARTIAL, REPLICATED, read)).any()
            cast = source.ops[0].writes[0].tensor != t.name
            out += local * (op.region is not None and bool(moved or cast))
            out += local * (t.needs_grad and bool((gradient_states(written) != read).any()))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_what_a_node_alone_has_in_flight_is_in_every_strategys_buffers(seed):
    m = zoo.get("llama3_8b?layers=2&batch=8&seq=256")
    problem = SplitProblem.of(trace(m.loss_fn, m.params, m.batch).graph, 8, "h100x8", "analytic", "adam")
    (mesh,) = problem.meshes("2x2x2", 3)
    space = problem.pricing.space(mesh)
    flight = in_flight_at_least(problem.graph, mesh, space.configs)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        choice = [int(rng.integers(len(c))) for c in space.configs]
        chosen = {n.name: c[i] for n, c, i in zip(space.graph.nodes, space.configs, choice, strict=True)}
        least = max(float(f[i]) for f, i in zip(flight, choice, strict=True))
        assert 0 < least <= memory(problem.graph, mesh, chosen).buffers + 1


def test_the_account_counts_what_is_kept():
    """On one device, activations consist of the inputs and what is kept."""
    loss, p, x = jax_loop("read_again", 16)
    plan = pase.compile(loss, p, x, devices=1)
    m = memory(plan.graph, plan.mesh, {n.name: config_of(plan, n) for n in plan.graph.nodes})
    assert m.activations == residual_bytes(plan.graph) + x.size * 4 == plan.memory.activations


def config_of(plan, node):
    from pase.tables.itemize import config_of

    return config_of(node, plan.strategy[node.name], plan.mesh)
