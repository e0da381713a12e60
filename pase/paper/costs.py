"""PaSE's layer and edge costs in FLOP, derived from access maps. A word is one element.

Notation: P is a split count, x' a per-device extent, and AR(w, P) = r · 2(P-1)/P · w the all-reduce of w words.
A product costs 3 m'n'k' multiply-adds and three all-reduces: of its partial sums over P_k, of its input's gradient
over P_n, and of its weight's gradient over P_m. The access maps say which dims these are, so one rule covers matmul,
conv, attention and look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.ir import Access, AccessMap, Node, Op
from pase.paper.layers import LayerFlow, Layers
from pase.tables.layouts import concrete_size

__all__ = ["PROTOTYPE", "SOUND", "Rules", "flow_cost", "layer_cost", "map_splits"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The constant r, and which of the prototype's simplifications apply (all of them in PROTOTYPE).

    flop_per_word: r = F/B for 8-byte words, 10 TFLOPS over 16 GB/s.
    im2col_gradient: a conv's input gradient is all-reduced at its im2col volume, r·s times too much.
    dense_lookup: an embedding is a product with one-hot rows.
    norm_over_batch: batch norm all-reduces four tensors of channels × height × width.
    spatial: whether a conv may split height and width; the prototype's may not.
    """

    flop_per_word: float = 5000.0
    im2col_gradient: bool = True
    dense_lookup: bool = True
    norm_over_batch: bool = True
    spatial: bool = False


PROTOTYPE = Rules()
SOUND = Rules(im2col_gradient=False, dense_lookup=False, norm_over_batch=False)
"""The paper's formulas without the prototype's errors."""


class _Local:
    """Per-device extents and split counts of sets of dims. counts: int64 [K, dims]."""

    def __init__(self, node: Node, counts: np.ndarray):
        self.node, self.counts = node, counts
        self.index = {d.name: i for i, d in enumerate(node.space)}
        self.extent = [concrete_size(d.size, node.name) for d in node.space]

    def ways(self, dims: Sequence[str]) -> np.ndarray:
        """The product of the split counts of these dims, P: int64 [K]."""
        return self.counts[:, [self.index[d] for d in dims]].prod(axis=1)

    def words(self, dims: Sequence[str]) -> np.ndarray:
        """The number of points of these dims on one device: float64 [K]."""
        total = 1.0
        for d in dims:
            total *= self.extent[self.index[d]]
        return total / self.ways(dims)


def _all_reduce(rules: Rules, words: np.ndarray, ways: np.ndarray) -> np.ndarray:
    """FLOP of an all-reduce of ``words`` over ``ways`` devices: AR(w, P)."""
    return rules.flop_per_word * 2 * (ways - 1) / ways * words


def layer_cost(layers: Layers, node: Node, counts: np.ndarray, rules: Rules) -> np.ndarray:
    """FLOP of one step of this layer for each config: float64 [K]."""
    local = _Local(node, counts)
    total = np.zeros(len(counts))
    for op in node.ops:
        times = float(concrete_size(op.times, node.name))
        if op.kind in ("matmul", "conv"):
            total += times * _product(op, local, rules)
        elif op.kind == "gather" and any(a.tensor in layers.parameters for a in op.reads):
            total += times * _lookup(op, local, rules)
        elif op.kind != "view":
            total += times * _light(layers, op, local, rules)
    if rules.norm_over_batch:
        total += _norm_over_batch(node, local, rules)
    return total


def _product(op: Op, local: _Local, rules: Rules) -> np.ndarray:
    """FLOP of a product: its multiply-adds, and all-reduces of its result and of the gradients of its operands."""
    every = op.dims
    x, w = op.factors
    out = op.writes[0]

    def other(a: Access) -> list[str]:
        return [d for d in every if d not in a.map.dims]

    def volume(a: Access) -> np.ndarray:
        windows = [d for d in w.map.dims if d in other(a) and local.node.space[d].kind == "window"]
        conv_input = op.kind == "conv" and a is x and rules.im2col_gradient
        return local.words([*a.map.dims, *windows] if conv_input else a.map.dims)

    cost = 3 * local.words(every)
    cost = cost + _all_reduce(rules, local.words(out.map.dims), local.ways(other(out)))
    for a in op.reads:
        cost = cost + _all_reduce(rules, volume(a), local.ways(other(a)))
    return cost


def _lookup(op: Op, local: _Local, rules: Rules) -> np.ndarray:
    """A look-up of rows in a table, priced as a product with one-hot rows, or as the copy that it is."""
    table = op.reads[0]
    out = op.writes[0].map.dims
    vocabulary = [d for d in table.map.dims if d not in out]
    rows = [d for d in out if d not in table.map.dims]
    width = [d for d in out if d in table.map.dims]
    sums = _all_reduce(rules, local.words(out), local.ways(vocabulary))
    table_gradient = _all_reduce(rules, local.words(table.map.dims), local.ways(rows))
    if not rules.dense_lookup:
        return local.words(out) + sums + table_gradient
    one_hot_gradient = _all_reduce(rules, local.words([*rows, *vocabulary]), local.ways(width))
    return 3 * local.words([*rows, *vocabulary, *width]) + sums + table_gradient + one_hot_gradient


def _light(layers: Layers, op: Op, local: _Local, rules: Rules) -> np.ndarray:
    """A few FLOP per element, and all-reduces of partial sums and of the gradients of weights."""
    cost = op.flops_per_point * local.words(op.worked)
    for a in op.writes:
        summed = [d for d in op.dims if d not in a.map.dims]
        cost = cost + _all_reduce(rules, local.words(a.map.dims), local.ways(summed))
    for a in op.reads:
        if a.tensor in layers.parameters:
            other = [d for d in op.dims if d not in a.map.dims]
            cost = cost + _all_reduce(rules, local.words(a.map.dims), local.ways(other))
    return cost


def _norm_over_batch(node: Node, local: _Local, rules: Rules) -> np.ndarray:
    """The prototype's batch norm: it takes mean and variance over the batch only, and all-reduces each of them, and its
    gradient, as channels × height × width."""
    total = np.zeros(len(local.counts))
    for op in node.ops:
        if op.kind == "reduce" and len(op.reads[0].map.dims) == 4:
            batch, *rest = op.reads[0].map.dims
            kept = op.writes[0].map.dims
            if kept and batch not in kept:
                total += 2 * _all_reduce(rules, local.words(rest), local.ways([batch]))
    return total


def map_splits(node: Node, counts: np.ndarray, access: AccessMap) -> np.ndarray:
    """The number of parts into which each tensor dim is split: int64 [K, tensor dims]."""
    index = {d.name: i for i, d in enumerate(node.space)}
    columns = [counts[:, [index[d] for d in w.dims]].prod(axis=1) for w in access.walks]
    return np.stack(columns, axis=1) if columns else np.ones((len(counts), 0), dtype=np.int64)


def flow_cost(flow: LayerFlow, a: np.ndarray, b: np.ndarray, rules: Rules) -> np.ndarray:
    """FLOP of one flow for splits a [S, dims] of the writer and b [D, dims] of the reader: float64 [S, D].

    The cost is twice (there and back) r times the words that the reader needs but does not have. The reader has the
    overlap of the two blocks, but nothing if the tensor is spread over more devices than at the writer.
    """
    if not flow.shape:
        return np.zeros((len(a), len(b)))
    shape = np.array(flow.shape, dtype=float)
    need = (shape / b).prod(axis=1)[None, :]
    inter = np.ones((len(a), len(b)))
    for t, extent in enumerate(shape):
        inter *= np.minimum.outer(extent / a[:, t], extent / b[:, t])
    inter = np.where(b.prod(axis=1)[None, :] > a.prod(axis=1)[:, None], 0.0, inter)
    return flow.times * 2 * rules.flop_per_word * np.maximum(0.0, need - inter)
