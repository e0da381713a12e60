"""Gathers and scatters that are decomposed to overlap with the adjacent products, piece by piece.

This is collective matmul (Wang et al., ASPLOS 2023) or asynchronous tensor parallelism. A gather of n parts becomes
n - 1 hops: each part of the rows is multiplied while the next part is in transit. A reduce-scatter is the reverse: each
part is computed while the sum of the previous part is in transit. With pieces of rows,

    seconds = (n - 1) * max(piece + slow * hop, hop) + piece.

The product alone accounts for its own seconds, and compute waits for the rest. A collective is decomposed only if that
rest is shorter than the collective itself, so this never raises the price of a strategy.

No compute overlaps with two collectives. A product overlaps with the scatter of its result only if it splits nothing
but rows and the contraction, over all devices. In that case its operand is split over all devices and was not gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from pase.ir import Access, Edge, Graph, Node, Op, Remark
from pase.ir.precision import operand_bytes, rate_dtype
from pase.machine import CollectiveKind, CostModel, Machine, Mesh
from pase.once import once
from pase.tables.axis_layout import PARTIAL, tensor_dim
from pase.tables.layouts import concrete_size

__all__ = [
    "TAKEN_APART",
    "Decompose",
    "DecomposedProduct",
    "Products",
    "decomposed",
    "decomposed_times",
    "made_by",
    "read_by",
    "slowed",
    "sums_apart",
]

Decompose = Literal["none", "products"]
"""Which collectives an executor decomposes: none, or gathers and scatters adjacent to products with weights."""

_REMARK = (
    "gathers and scatters next to products with weights are priced as overlapping with them, piece by piece: the "
    "executor has to decompose them (XLA's windowed einsum, Transformer Engine, PyTorch's async tensor parallelism); "
    "programs from pase's manual lowering wait for them"
)


def decomposed(graph: Graph) -> Graph:
    """The graph for an executor that decomposes collectives next to products. graph: the simplified graph."""
    return replace(
        graph,
        facts=replace(graph.facts, decomposed=True),
        remarks=(*graph.remarks, Remark("assumed", _REMARK)),
    )


def slowed(machine: Machine) -> float:
    """The fraction of the device's compute units that collectives occupy while they run."""
    units = machine.device.compute_units
    return machine.collective_units / units if units else 0.0


TAKEN_APART: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
"""Kinds of collectives that can be decomposed."""


@dataclass(frozen=True, kw_only=True)
class DecomposedProduct:
    """A product with a weight, rows × depth by depth × columns, with global extents.

    read_bytes, weight_bytes, made_bytes: bytes per element of the operand, the weight and the result. weighted: the
    dims of the result's tensor that come from the weight.
    """

    rows: int
    columns: int
    depth: int
    dtype: str
    read_bytes: float
    weight_bytes: float
    made_bytes: float
    weighted: frozenset[int] = frozenset()

    def seconds(self, rows: ArrayLike, columns: ArrayLike, depth: ArrayLike, model: CostModel) -> np.ndarray:
        """Seconds of the product, or of the product for its operand's gradient, with these local extents."""
        m, n, k = (np.maximum(x, 1.0) for x in (rows, columns, depth))
        nbytes = m * k * self.read_bytes + k * n * self.weight_bytes + m * n * self.made_bytes
        return model.compute("matmul", self.dtype, 2.0 * m * n * k, nbytes, mnk=(m, n, k))


Products = tuple[DecomposedProduct, ...]


def read_by(graph: Graph, edge: Edge) -> Products:
    """The products that read an edge's tensor, directly or through the copy node at the edge's end.

    Empty if nothing is decomposed. It is also empty for edges from a copy node: its tensor was gathered before the
    copy.
    """
    if not graph.facts.decomposed or graph.node[edge.src].kind == "copy":
        return ()
    reader = graph.node[edge.dst]
    if reader.kind == "copy":
        reads = _of_copies(graph)[reader.name]
    else:
        reads = [(reader, op, a) for op, a in reader.reads if a.tensor == edge.tensor]
    found = [_product(graph, *read) for read in reads]
    return tuple(p for p in found if p is not None)


@once
def _of_copies(graph: Graph) -> dict[str, list[tuple[Node, Op, Access]]]:
    """For each copy node, the accesses that read its tensor."""
    out: dict[str, list[tuple[Node, Op, Access]]] = {n.name: [] for n in graph.nodes if n.kind == "copy"}
    for n in graph.nodes:
        for op, a in n.reads:
            maker = graph.producer.get(a.tensor)
            if maker is not None and maker.kind == "copy":
                out[maker.name].append((n, op, a))
    return out


def made_by(graph: Graph, edge: Edge) -> Products:
    """The product that makes an edge's tensor. Empty if another op makes it, or if nothing is decomposed."""
    maker, _ = graph.node[edge.src].write_of(edge.tensor)
    if not graph.facts.decomposed or maker.kind != "matmul":
        return ()
    found = [_product(graph, graph.node[edge.src], maker, a) for a in maker.reads]
    return tuple(p for p in found if p is not None)


def _product(graph: Graph, node: Node, op: Op, rows: Access) -> DecomposedProduct | None:
    """The product of an operand with a weight. rows: the operand's access. None for other ops and grouped products."""
    if op.kind != "matmul" or op.backward or len(op.reads) != 2:
        return None
    (weight,) = (a for a in op.reads if a is not rows)
    of_weight, of_rows = (graph.producer.get(a.tensor) for a in (weight, rows))
    x, w, y = (set(a.map.dims) for a in (rows, weight, op.writes[0]))
    stored = of_weight is not None and of_weight.kind == "parameter"
    if not stored or (of_rows is not None and of_rows.kind == "parameter") or x & w & y:
        return None

    def extent(dims: set[str]) -> int:
        return math.prod(concrete_size(node.space[d].size, node.name) for d in dims)

    def itemsize(a: Access) -> float:
        return float(graph.tensors[a.tensor].itemsize)

    cast = None if op.product_dtype is None else operand_bytes(op.product_dtype)
    return DecomposedProduct(
        rows=extent(y - w),
        columns=extent(y - x),
        depth=extent((x & w) - y),
        dtype=rate_dtype(op, op.product_dtype or graph.tensors[rows.tensor].dtype),
        read_bytes=itemsize(rows) if cast is None else cast,
        weight_bytes=itemsize(weight) if cast is None else cast,
        made_bytes=itemsize(op.writes[0]),
        weighted=frozenset(i for i, walk in enumerate(op.writes[0].map.walks) if w & set(walk.dims)),
    )


def sums_apart(product: DecomposedProduct, written: np.ndarray, mesh: Mesh) -> np.ndarray:
    """bool [S]: whether a product that writes in these layouts splits only rows and the contraction, over all devices.

    written: of a write_rule, int64 [S, axes].
    """
    rows = (written >= 0) & ~np.isin(tensor_dim(np.maximum(written, 0)), sorted(product.weighted))
    return ((written == PARTIAL) | rows | (np.array(mesh.sizes) == 1)).all(axis=1)


def decomposed_times(
    products: Products,
    kind: CollectiveKind,
    back: bool,
    axes: np.ndarray,
    nbytes: np.ndarray,
    whole: np.ndarray | float,
    mesh: Mesh,
    model: CostModel,
) -> np.ndarray:
    """Seconds that compute waits for a gather or a scatter that overlaps with these products.

    kind, axes, nbytes: as in CostModel.collective. back: whether the collective is for a gradient and overlaps with the
    products that compute the operand's gradient. whole: bytes of the whole tensor. Devices that do not split the rows
    are assumed to split the columns if the tensor is read, and the contraction if it is made. This is the shortest that
    the product can be in any strategy.
    """
    ways = np.array([mesh.ways(bits) for bits in range(1 << len(mesh.sizes))], dtype=float)[axes]
    parts = whole / np.where(nbytes > 0, nbytes, np.inf)
    others = mesh.devices / np.maximum(parts, 1e-300)
    read = (kind == "all_gather") != back
    full = piece = np.zeros(())
    for p in products:
        rows = p.rows * np.where(parts > 0, 1 / np.maximum(parts, 1e-300), 0.0)
        columns = p.columns / others if read else np.full_like(others, p.columns)
        depth = np.full_like(others, p.depth) if read else p.depth / others
        inner, outer = (columns, depth) if back else (depth, columns)
        full = full + p.seconds(rows, outer, inner, model)
        piece = piece + p.seconds(rows / ways, outer, inner, model)
    hop = model.collective("permute", mesh, axes, nbytes / ways)
    work = piece + slowed(model.machine) * hop
    # An arrived piece is read, added to the next part (another read), and written.
    if kind == "reduce_scatter":
        work = work + model.compute("memory", products[0].dtype, 0.0, 3 * nbytes / ways)
    return np.asarray(np.maximum((ways - 1) * np.maximum(work, hop) + piece - full, 0.0))
