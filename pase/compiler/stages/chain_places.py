"""The places of a model's nodes in a chain of unequal units (``pase.ir.cut_points``), and what a range of units has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pase.compiler.stages.places import Places, StagePart, outermost_loops, places_of
from pase.errors import Infeasible
from pase.ir import Graph
from pase.ir.blocks import Block, holders
from pase.ir.cut_points import UnitChain, chain_of, loops_over_layers, op_work

__all__ = ["UnitPlaces", "UnitRange", "divided"]

UnitRange = tuple[int, int]
"""Units of a chain: (first, end)."""
_PER_STEP = "per step"
"""The part of what several iterations of a loop read unchanged."""
_MOST_OUTSIDE = 0.5
"""If more than this fraction of the work is outside of written-out equal blocks, the model is cut at its cut points."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPlaces(Places):
    """The places in a chain of unequal units.

    chain: the chain of the model.
    ranges: node -> the units that have it. A parameter, and whatever is computed from parameters or from the batch
        alone, has several ranges, one per reader.
    by_iteration: nodes of which each iteration of a loop has its own part. If several loops read one stack, each stage
        with an iteration of one of them has the whole stack, as the backend does.
    parameters: the trained ones.
    """

    chain: UnitChain
    ranges: Mapping[str, frozenset[UnitRange]]
    by_iteration: frozenset[str]
    parameters: frozenset[str]

    def share(self, node: str, units: UnitRange) -> float:
        """Return the fraction of a node's work that a stage with these units has."""
        if node in self.by_iteration:
            return sum(_overlap(r, units) / (r[1] - r[0]) for r in self.ranges[node])
        return float(any(_overlap(r, units) for r in self.ranges[node]))

    def apart(self, node: str, unit: int) -> float:
        """Return the fraction of a node's work that belongs to this unit and to no other."""
        alone = [b - a for a, b in self.ranges[node]] == [1]
        return self.share(node, (unit, unit + 1)) if alone or node in self.by_iteration else 0.0

    def within(self, units: UnitRange) -> Places:
        """Return the places within a stage with these units. A node that several units read is there once."""
        parts: dict[str, tuple[StagePart, ...]] = {}
        for name, found in self.ranges.items():
            first = min((max(r[0], units[0]) for r in found if _overlap(r, units)), default=None)
            if first is not None:
                label = self.labels[first]
                parts[name] = (label if name in self.by_iteration or self.sizes[label] == 1 else _PER_STEP,)
        return Places(parts=parts, blocks=self.blocks, crossing=(), numbers={}, sizes=self.sizes)

    def parts_in(self, units: UnitRange) -> list[StagePart]:
        """Return the parts of a stage with these units: the part that is there once, then one per unit."""
        return [_PER_STEP, *self.labels[slice(*units)]]

    @cached_property
    def labels(self) -> list[StagePart]:
        """The part of each unit. All iterations of a loop have the same part."""
        first = {u: a for a, b in self.chain.loops.values() for u in range(a, b)}
        return [f"unit {first.get(u, u)}" for u in range(self.blocks)]

    def shared(self, units: UnitRange) -> tuple[str, ...]:
        """Return the parameters that these units read and that units outside of them read too."""
        return tuple(
            name
            for name in self.parameters - self.by_iteration
            if any(_overlap(r, units) for r in self.ranges[name])
            and not all(units[0] <= r[0] and r[1] <= units[1] for r in self.ranges[name])
        )

    def stages_of(self, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
        ends = [sum(cuts[: k + 1]) for k in range(len(cuts))]
        stages = [(end - many, end) for end, many in zip(ends, cuts, strict=True)]
        out = {}
        for name, found in self.ranges.items():
            mine = tuple(k for k, s in enumerate(stages) if any(_overlap(r, s) for r in found))
            if len(mine) < len(cuts):
                out[name] = mine or (0,)
        return out


def _overlap(a: UnitRange, b: UnitRange) -> int:
    return max(min(a[1], b[1]) - max(a[0], b[0]), 0)


def divided(graph: Graph, written_out: Sequence[Block] = (), chain: UnitChain | None = None) -> Places:
    """Return where a model may be cut.

    It is cut between the equal blocks of its only loop over layers, or of layers that are written out and hold most of
    its work. Any other model is cut at its cut points, and the result is a ``UnitPlaces``.

    Raises Infeasible if the model has no cut point.

    chain: the chain of the same model without recomputation, if it is known.
    """
    if chain is not None:
        return _by_units(graph, chain)
    loops = loops_over_layers(graph)
    # If there are other loops too (over time, over chunks of the loss), how often a node runs does not tell whether it
    # belongs to a layer.
    layers = len(loops) == 1 or (len(written_out) > 1 and _outside(graph, written_out) < _MOST_OUTSIDE)
    if layers and len(loops) < 2 and loops.keys() == outermost_loops(graph.nodes):
        return places_of(graph, written_out)
    chain = chain_of(graph, written_out)
    if chain.units < 2:
        raise Infeasible(
            "it cannot be cut into stages: it is one product, or one loop, as a whole",
            where=f"'{graph.name}'",
            fix="leave out pipeline (--pipeline)",
        )
    return _by_units(graph, chain)


def _by_units(graph: Graph, chain: UnitChain) -> UnitPlaces:
    ranges, by_iteration = _ranges(graph, chain)
    first = {u: (a, b) for a, b in chain.loops.values() for u in range(a, b)}
    sizes = {f"unit {first.get(u, (u, u + 1))[0]}": 1 for u in range(chain.units)}
    sizes |= {f"unit {a}": b - a for a, b in chain.loops.values()} | {_PER_STEP: 1}
    return UnitPlaces(
        parts={name: (f"unit {first.get(min(r)[0], min(r))[0]}",) for name, r in ranges.items()},
        blocks=chain.units,
        crossing=(),
        numbers={},
        sizes=sizes,
        chain=chain,
        ranges=ranges,
        by_iteration=by_iteration,
        parameters=frozenset(n.name for n in graph.nodes if n.kind == "parameter"),
    )


def _outside(graph: Graph, blocks: Sequence[Block]) -> float:
    """Return the fraction of the work that is outside of written-out blocks."""
    held_by, inside, whole = holders(blocks), 0.0, 0.0
    for n in graph.nodes:
        whole += op_work(n)
        inside += op_work(n) if any(held_by(op.eqn) for op in n.ops) else 0.0
    return 1 - inside / whole if whole else 1.0


def _ranges(graph: Graph, chain: UnitChain) -> tuple[dict[str, frozenset[UnitRange]], frozenset[str]]:
    """Return (the units that have each node, the nodes that belong to a loop's iterations)."""
    loop = {f"{path}.": units for path, units in chain.loops.items()}
    out: dict[str, frozenset[UnitRange]] = {name: frozenset([units]) for name, units in chain.of.items()}
    by_iteration = {name for name, units in chain.of.items() if units in chain.loops.values()}
    readers: dict[str, list[str]] = {n.name: [] for n in graph.nodes}
    for e in graph.edges:
        readers[e.src].append(e.dst)
    for n in reversed(graph.nodes):
        if n.name in out:
            continue
        around = {loop[s.path] for op in n.ops for s in op.scope[:1] if s.path in loop}
        if len(around) == 1 and all(op.scope or op is n.ops[0] for op in n.ops):
            out[n.name] = frozenset(around)
            by_iteration.add(n.name)
        else:
            found = frozenset[UnitRange]().union(*(out.get(r, frozenset()) for r in readers[n.name]))
            out[n.name] = found or frozenset([(0, 1)])
    return out, frozenset(by_iteration)
