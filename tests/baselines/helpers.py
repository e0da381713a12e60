"""Traced graphs, and the collectives of a strategy as plain records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from pase import costmodels, machine, zoo
from pase.baselines import Baseline, baselines, roles
from pase.baselines.rules import RULES
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import Mesh
from pase.tables.charges import Charge, edge_charges, node_charges
from pase.tables.layouts import read_rule, write_rule


@cache
def graph_of(model: str) -> Graph:
    m = zoo.get(model)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One collective of a strategy. nbytes: as in CostModel.collective. times: runs in a step."""

    src: str
    dst: str
    kind: str
    axes: tuple[str, ...]
    nbytes: float
    phase: str
    times: float


def collectives(graph: Graph, baseline: Baseline) -> list[Sent]:
    mesh = baseline.mesh
    out: list[Sent] = []
    for n in graph.nodes:
        cfg = baseline.strategy[n.name][None]
        out += _sent(n.name, n.name, node_charges(graph, n, cfg, mesh), mesh)
    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        op, write = src.write_of(e.tensor)
        written = write_rule(src, op, write).states(baseline.strategy[e.src][None], mesh)
        wanted = read_rule(dst, e.op, e.access).states(baseline.strategy[e.dst][None], mesh)
        out += _sent(e.src, e.dst, edge_charges(graph, e, written, wanted, mesh), mesh)
    return out


def _sent(src: str, dst: str, charges: Iterator[Charge], mesh: Mesh) -> Iterator[Sent]:
    for c in charges:
        bits = int(np.ravel(c.axes)[0])
        if bits:
            yield Sent(
                src=src,
                dst=dst,
                kind=c.kind,
                axes=tuple(name for i, name in enumerate(mesh.names) if bits >> i & 1),
                nbytes=float(np.ravel(c.nbytes)[0]),
                phase=c.phase,
                times=c.times,
            )


H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)
LAYERS, BATCH, SEQ, WIDTH, VOCAB = 3, 128, 1024, 768, 50304
GPT = f"gpt2?layers={LAYERS}&vocab={VOCAB}&remat=0"
GPT_REMAT = f"gpt2?layers={LAYERS}&vocab={VOCAB}&remat=1"


@cache
def made(model, devices, name):
    """The strategy of this name."""
    (found,) = baselines(graph_of(model), devices, H100, MODEL, only=(name,))
    return found


def offered(model, devices):
    """What each baseline offers before the search fills it in: name -> intent, or the reason if there is none."""
    return {m.name: m for rule in RULES.values() for m in rule(graph_of(model), devices, H100)}


def split(graph, b, node):
    """Axis -> dim that it splits, by name, for one node."""
    dims = graph.node[node].space.dims
    return {b.mesh.names[a]: dims[d].name for a, d in enumerate(b.strategy[node]) if d >= 0}


def weights(graph):
    return {w.parameter for w in roles(graph).weights}
