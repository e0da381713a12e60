"""Converts a GraphDef, or the part of it that some outputs need, to plain data. Version 1 loops become While nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.tf.graph import TfBody, TfGraph, TfNode, data_inputs, ordered
from pase.frontends.tf.v1 import raise_loops

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef

__all__ = ["graph_of"]


def graph_of(graph_def: GraphDef, outputs: Sequence[str], args: Sequence[str] = ()) -> TfGraph:
    """The part of a GraphDef that ``outputs`` (``node:k``) need.

    args: placeholders whose values come from outside. What feeds them in the graph is ignored.
    """
    library = {f.signature.name: f for f in graph_def.library.function}
    made: dict[str, TfBody] = {}
    nodes: dict[str, TfNode] = {}
    for n in graph_def.node:
        if n.name in nodes:
            raise PaseError("two nodes of the graph have this name", where=f"node '{n.name}'")
        nodes[n.name] = TfNode(name=n.name, op=n.op, inputs=tuple(data_inputs(n.input, _plain)), attr=n.attr)
    wanted = tuple(map(_plain, outputs))
    if any(n.op == "Enter" or n.op == "RefEnter" for n in nodes.values()):
        nodes = raise_loops(nodes, made)
    main = TfBody(name="", nodes=ordered(nodes, wanted, args, "the graph"), args=tuple(args), outputs=wanted)
    graph = TfGraph(main=main, library=library, made=made)
    graph.check_size()
    return graph


def _plain(ref: str) -> str:
    """``node`` or ``node:k`` -> ``node:k``."""
    name, colon, k = ref.rpartition(":")
    if not colon:
        return f"{ref}:0"
    if not k.isdecimal() or len(k) > 6:
        raise PaseError(f"'{ref[:200]}' is not a reference to a tensor, which must be NODE or NODE:NUMBER")
    return f"{name}:{int(k)}"
