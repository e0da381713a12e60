"""The nodes that compute something of parameters alone: a weight divided by its norm, merged or quantised."""

from __future__ import annotations

from pase.ir.types import LEAF, Graph
from pase.once import once

__all__ = ["made_of_weights"]


@once
def made_of_weights(graph: Graph) -> frozenset[str]:
    """The nodes that compute something of parameters alone, and the copies of parameters that these read."""
    alone = {n.name for n in graph.nodes if n.kind == "parameter"}
    found, copied = set[str](), set[str]()
    for n in graph.nodes:  # in execution order
        before = {p.name: p for _, a in n.reads if (p := graph.producer.get(a.tensor))}
        if n.kind in LEAF | {"carry"} or not before or not before.keys() <= alone:
            continue
        alone.add(n.name)
        if n.kind != "copy":
            found.add(n.name)
            copied |= {name for name, p in before.items() if p.kind == "copy"}
    return frozenset(found | copied)
