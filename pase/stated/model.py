"""Turns a user's model into the graph on which a stated strategy is priced: one micro-batch without recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.compiler.problem.problem import SplitProblem
from pase.errors import Infeasible, PaseError
from pase.frontends.blocks import block_ways
from pase.ir import Graph, Op, named, simplify
from pase.once import once
from pase.stated.columns import with_own_columns
from pase.stated.price import Priced, price_strategy
from pase.stated.program import Program
from pase.stated.rows import with_own_rows
from pase.stated.strategy import Strategy

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["micro_batch_graph", "price_model"]


def price_model(problem: SplitProblem, traced: Traced, s: Strategy, program: Program) -> Priced:
    """Price a strategy on a traced model. Raises Infeasible, with the reason, if the model cannot be run so."""
    if problem.model.unit != "s":
        raise PaseError(
            f"a stated strategy is priced in seconds, but cost model '{problem.model.name}' has none",
            fix="use cost_model='analytic'",
        )
    ways = block_ways(traced)
    examples = ways.batch_size(traced)
    own = examples // s.ranks
    if own * s.ranks != examples:
        raise Infeasible(
            f"a batch of {examples} cannot be divided by the {s.ranks} data-parallel ranks",
            where=str(s),
            fix="change the batch, or the number of data-parallel ranks",
        )
    micro = s.micro or (1 if s.pipeline > 1 else own)
    if own % micro:
        raise Infeasible(
            f"{own} examples of a data-parallel rank are not whole micro-batches of {micro}",
            where=str(s),
            fix="use a divisor for micro",
        )
    marked = any(op.remat for n in problem.graph.nodes for op in n.ops)
    given = s
    s = replace(s, micro=micro, remat=s.remat or ("full" if marked else "none"))
    at_once = micro * s.ranks
    samples = max(at_once, 2)  # in a batch of one, examples could not be told from positions
    if examples % samples:
        raise Infeasible(f"a batch of {examples} cannot be read as micro-batches of {samples}", where=str(s))
    traced = ways.micro(traced, examples // samples)
    blocks = ways.blocks_of(traced, marked=True)
    doubled = at_once == 1
    graph = with_own_rows(micro_batch_graph(traced, 1, s.tensor), replace(s, data=2) if doubled else s)
    priced = price_strategy(graph, s, program, problem.model, examples, blocks, doubled=doubled)
    return replace(priced, added=tuple(_added(given, s, marked)))


def _added(given: Strategy, s: Strategy, marked: bool) -> Iterator[str]:
    """Yield what the user did not state. marked: whether the model marks blocks for recomputation."""
    if given.micro is None:
        why = "one example, because there are stages" if s.pipeline > 1 else "all examples of a rank at once"
        yield f"micro={s.micro} ({why})"
    if given.remat is None:
        yield f"remat={s.remat} ({'the model marks its blocks' if marked else 'the model marks nothing'})"
    if s.shard > 1 and s.zero == 3:
        yield "zero=3 (parameters, gradients and optimizer state over fsdp)"
    if s.pipeline > 1 and given.schedule is None:
        yield f"schedule={'interleaved' if s.chunks > 1 else '1f1b'}"


def micro_batch_graph(traced: Traced, parts: int, tensor: int = 1) -> Graph:
    """Return the graph of one part of the batch, split into this many parts, without recomputation.

    tensor: the ranks of tensor parallelism, each of which has its own columns of each part of a merged product.
    """
    raw = traced.graph if parts == 1 else block_ways(traced).micro(traced, parts).graph
    return _unmarked(with_own_columns(raw, tensor) if tensor > 1 else raw)


@once
def _unmarked(raw: Graph) -> Graph:
    """Return a traced graph, simplified, without recomputation, because the strategy decides what is recomputed."""
    graph = named(simplify(raw))

    def plain(op: Op) -> Op:
        reads = tuple(replace(a, recompute=False) for a in op.reads)
        return replace(op, remat=False, reads=reads, scope=op.loops)

    return replace(graph, nodes=tuple(replace(n, ops=tuple(map(plain, n.ops))) for n in graph.nodes))
