"""Places a stated strategy on the graph: a mesh, and the configs that it allows for each node.

The search takes the cheapest of these configs. Parameters are replicated over the data axes here, because ZeRO shards
flat arrays (``pase.stated.parts``).
"""

from __future__ import annotations

import numpy as np

from pase.baselines import Baseline, Intent, Roles, Skipped, roles
from pase.baselines.fill_in import fill_in_alone
from pase.baselines.masks import by_batch, free, most, only
from pase.errors import Infeasible
from pase.ir import Graph, Node
from pase.machine import CostModel, Mesh
from pase.once import once
from pase.stated.strategy import Strategy
from pase.tables.itemize import Collective
from pase.tables.layouts import NOT_SPLIT

__all__ = ["SECOND", "numbers_heads", "place", "stage_mesh"]


SECOND = "second"
"""The outermost axis of a mesh for a graph of two examples where a micro-batch of all ranks has only one. A dim of one
element is not a dim, so such a graph is traced with two examples, and the second one is on devices of its own, which
nothing counts."""


def stage_mesh(s: Strategy, *, doubled: bool = False) -> Mesh:
    """Return the devices of one stage in Megatron's order, innermost first: tensor, context, experts, data.

    doubled: whether the graph has two examples for a micro-batch of one (``SECOND``).
    """
    axes = {"data": s.ranks // s.expert, "expert": s.expert, "context": s.context, "model": s.tensor}
    if doubled:
        axes = {SECOND: 2, **axes}
    kept = {name: size for name, size in axes.items() if size > 1} or {"data": 1}
    return Mesh(names=tuple(kept), sizes=tuple(kept.values()))


def place(
    graph: Graph, s: Strategy, model: CostModel, *, whole_logits: bool = False, doubled: bool = False
) -> Baseline:
    """Return the strategy of one stage. Raises Infeasible, with the reason, if the graph cannot be split so.

    whole_logits: as in ``Program``.
    doubled: as in ``stage_mesh``.
    """
    r = roles(graph)
    _refuse(graph, r, s)
    found = _placed(graph, stage_mesh(s, doubled=doubled), s.sequence, s.heads, whole_logits, model)
    if not isinstance(found, Baseline):
        raise Infeasible(found.reason, where=f"{s} on '{graph.name}'")
    return found


@once
def _placed(
    graph: Graph, mesh: Mesh, sequence: bool, heads: bool, whole_logits: bool, model: CostModel
) -> Baseline | Skipped:
    """Return what strategies on one mesh share, whatever they recompute, shard flat or run in stages."""
    allowed = _Allowed(roles(graph), sequence, heads, whole_logits)
    return fill_in_alone(Intent(name="stated", mesh=mesh, allow=allowed), graph, model)


def _refuse(graph: Graph, r: Roles, s: Strategy) -> None:
    def need(ways: int, dims: frozenset[int], what: str) -> None:
        sizes = r.sizes(graph, dims)
        if ways > 1 and not any(size % ways == 0 for size in sizes):
            raise Infeasible(
                f"{ways} ways divide none of its {what} ({sizes or 'none'})",
                where=f"{s} on '{graph.name}'",
                fix=f"use a degree that divides one of its {what}",
            )

    need(s.ranks, r.batch, "batch dims")
    need(s.tensor, r.tensor, "heads, hidden units and vocabularies")
    need(s.context, r.sequence, "sequence dims")
    need(s.expert, r.experts, "expert dims")
    if s.heads and not any(n.kind == "attention" for n in graph.nodes):
        raise Infeasible(
            "a2a exchanges positions for heads around fused attention, and the model writes its scores out",
            where=f"{s} on '{graph.name}'",
            fix="use fused attention (jax.nn.dot_product_attention, scaled_dot_product_attention), or leave out a2a",
        )
    for n in graph.nodes if s.heads else ():
        if n.kind == "attention":
            heads = [int(list(n.space)[i].size) for i in _heads_of_keys(r, n)]
            if not any(h % (s.tensor * s.context) == 0 for h in heads):
                raise Infeasible(
                    f"a2a cannot shard {heads or 'no'} heads of keys over {s.tensor * s.context} ways",
                    where=f"{s} on '{graph.name}'",
                    fix="use smaller cp, or leave out a2a",
                )


def numbers_heads(graph: Graph, c: Collective) -> bool:
    """Whether a collective around an attention whose heads context parallelism shards (``a2a``) only numbers them anew.

    A device's heads are some of its tensor rank's, whatever their numbers. The graph's layouts number heads by the
    context rank first, so they move heads between tensor ranks, too.
    """
    return "model" in c.axes and any(graph.node[name].kind == "attention" for name in (c.node, c.source))


def _heads_of_keys(r: Roles, attention: Node) -> list[int]:
    """Return the indices of the dims that number the heads of keys, of which several heads of queries share each."""
    keys = {name for op in attention.ops if op.kind == "attention" for name in op.reads[1].map.dims}
    return [i for i in r.dims(attention, r.tensor) if list(attention.space)[i].name in keys]


class _Allowed:
    """The configs that the strategy allows for a node (``pase.baselines.types.Allow``)."""

    def __init__(self, r: Roles, sequence: bool, heads: bool, whole_logits: bool) -> None:
        self.r, self.sequence, self.heads = r, sequence, heads
        self.own = {w.parameter for w in r.weights if r.experts & set(w.shared)}
        """The parameters of which each expert has its own. A router's is everybody's."""
        self.of_experts = self.own | {w.node for w in r.weights if w.parameter in self.own}
        self.splits_logits = {w.node for w in r.weights} if whole_logits else None
        """If logits are gathered: the nodes that may split the vocabulary, which are the embedding and the output."""

    def __call__(self, node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        at = {name: i for i, name in enumerate(mesh.names)}
        experts = self.r.dims(node, self.r.experts)
        shared = "expert" in at and bool(experts) and (node.kind != "parameter" or node.name in self.own)
        data = [
            at[name]
            for name in (SECOND, "data", "expert")
            if name in at and not (name == "expert" and shared)
        ]
        allowed = np.ones(len(cfg), dtype=bool)
        if shared:
            allowed &= self._experts(node, cfg, mesh, at["expert"], experts)
        if node.kind == "parameter":
            whole = [*data, *([at["context"]] if "context" in at else [])]
            allowed &= only(cfg, whole, [NOT_SPLIT])
        else:
            allowed &= by_batch(self.r, node, cfg, mesh, data)
            if "context" in at:
                allowed &= self._sequence(node, cfg, at["context"])
        return self._model(node, cfg, mesh, at["model"], allowed) if "model" in at else allowed

    def _experts(self, node: Node, cfg: np.ndarray, mesh: Mesh, axis: int, experts: list[int]) -> np.ndarray:
        """Split experts' weights and products with them over the experts; before and after, split in the cheapest way.

        Routing, dispatch and combination are products, too (GShard). Over experts, they would need the tokens of all.
        """
        if node.name in self.of_experts:
            on = only(cfg, [axis], experts)
            if on.any():
                return on
        return only(cfg, [axis], [*experts, *self.r.dims(node, self.r.batch), *free(node)])

    def _sequence(self, node: Node, cfg: np.ndarray, axis: int) -> np.ndarray:
        """Split the sequence over the axis, if the node has a sequence dim that may be split.

        With ``heads``, attention splits its heads instead.
        """
        positions = self.r.dims(node, self.r.sequence)
        if self.heads and node.kind == "attention":
            return only(cfg, [axis], _heads_of_keys(self.r, node))
        on = only(cfg, [axis], positions)
        return on if on.any() else only(cfg, [axis], free(node))

    def _model(self, node: Node, cfg: np.ndarray, mesh: Mesh, axis: int, allowed: np.ndarray) -> np.ndarray:
        """Split heads, hidden units and vocabulary like Megatron; with sequence parallelism, the sequence between."""
        r = self.r
        tensor, inside = r.dims(node, r.tensor), r.dims(node, r.tensor - r.ends)
        whole = self.splits_logits is not None and node.name not in self.splits_logits
        if whole and r.dims(node, r.ends) and node.kind not in ("parameter", "copy"):
            return allowed & only(cfg, [axis], free(node))
        sequence = r.dims(node, r.sequence) if self.sequence and not inside else []
        allowed = allowed & only(cfg, [axis], [*tensor, *sequence, *free(node)])
        if node.kind == "copy":
            return allowed
        if self.heads and node.kind == "attention":
            tensor = _heads_of_keys(r, node)
        if tensor:
            return most(cfg, allowed, tensor, mesh)
        if sequence and node.kind in ("elementwise", "reduce", "carry"):
            return most(cfg, allowed, sequence, mesh)
        return allowed
