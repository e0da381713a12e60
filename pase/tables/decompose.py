"""Gathers and scatters that run during the products beside them, piece by piece.

This is collective matmul (Wang et al., ASPLOS 2023) or asynchronous tensor parallelism. A gather of n parts is n - 1
hops: each part of the rows is multiplied while the next one is on its way. A scatter of sums is the same backwards:
each part is made while the sum of the one before is on its way. With pieces of rows,

    seconds = (n - 1) * max(piece + slow * hop, hop) + piece,

of which the product alone takes its own seconds, and the rest is waited for. A collective is taken apart only where
that rest is shorter than the collective. So the price of any strategy is at most what it is without.

No compute has two collectives beside it: a product's result has its scatter beside it only if the product splits
nothing but rows and contraction, over all devices. Then what it reads is split over all of them, and was not gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from pase.ir import Access, Edge, Graph, Node, Op, Remark
from pase.ir.precision import operand_bytes
from pase.machine import CollectiveKind, CostModel, Machine, Mesh
from pase.once import once
from pase.tables.layouts import PARTIAL, concrete_size, tensor_dim

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
"""Which collectives an executor takes apart: none, or gathers and scatters beside products with weights."""

_REMARK = (
    "gathers and scatters beside products with weights are priced as running during them, piece by piece: the executor "
    "has to take them apart (XLA's windowed einsum, Transformer Engine, PyTorch's async tensor parallelism); programs "
    "that pase lowers by hand wait for them"
)


def decomposed(graph: Graph) -> Graph:
    """The simplified graph, for an executor that takes collectives beside products apart."""
    return replace(
        graph,
        meta={**graph.meta, "decompose": "products"},
        remarks=(*graph.remarks, Remark("assumed", _REMARK)),
    )


def slowed(machine: Machine) -> float:
    """The part of the device's compute units that collectives occupy while they run."""
    units = machine.device.compute_units
    return machine.collective_units / units if units else 0.0


TAKEN_APART: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
"""Kinds of collectives that run piece by piece."""


@dataclass(frozen=True, kw_only=True)
class DecomposedProduct:
    """A product with a weight, of whole extents: rows × depth with depth × columns.

    read_bytes, weight_bytes, made_bytes: of one element of what it reads, of the weight, of its result. weighted: the
    dims of the result's tensor that walk the weight's.
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
        """Seconds of the product, or of the one for its operand's gradient, with local extents."""
        m, n, k = (np.maximum(x, 1.0) for x in (rows, columns, depth))
        nbytes = m * k * self.read_bytes + k * n * self.weight_bytes + m * n * self.made_bytes
        return model.compute("matmul", self.dtype, 2.0 * m * n * k, nbytes, mnk=(m, n, k))


Products = tuple[DecomposedProduct, ...]


def read_by(graph: Graph, edge: Edge) -> Products:
    """The products that read an edge's tensor, itself or through the copy at its end; none where nothing is taken
    apart. What a copy hands on was gathered before it."""
    if graph.meta.get("decompose") != "products" or graph.node[edge.src].kind == "copy":
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
    """Who reads what each copy hands on."""
    out: dict[str, list[tuple[Node, Op, Access]]] = {n.name: [] for n in graph.nodes if n.kind == "copy"}
    for n in graph.nodes:
        for op, a in n.reads:
            maker = graph.producer.get(a.tensor)
            if maker is not None and maker.kind == "copy":
                out[maker.name].append((n, op, a))
    return out


def made_by(graph: Graph, edge: Edge) -> Products:
    """The product that makes an edge's tensor, or none; none where nothing is taken apart."""
    maker, _ = graph.node[edge.src].write_of(edge.tensor)
    if graph.meta.get("decompose") != "products" or maker.kind != "matmul":
        return ()
    found = [_product(graph, graph.node[edge.src], maker, a) for a in maker.reads]
    return tuple(p for p in found if p is not None)


def _product(graph: Graph, node: Node, op: Op, rows: Access) -> DecomposedProduct | None:
    """The product of what an access reads with a weight. None: the op is another, or is products by groups."""
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
        dtype=op.product_dtype or graph.tensors[rows.tensor].dtype,
        read_bytes=itemsize(rows) if cast is None else cast,
        weight_bytes=itemsize(weight) if cast is None else cast,
        made_bytes=itemsize(op.writes[0]),
        weighted=frozenset(i for i, walk in enumerate(op.writes[0].map.walks) if w & set(walk.dims)),
    )


def sums_apart(product: DecomposedProduct, written: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Whether a product that writes in these layouts (write_states, int64 [S, axes]) splits nothing but rows and
    contraction, over all devices; bool [S]."""
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
    """What is waited for of a gather or a scatter that runs during these products, in seconds.

    kind, axes, nbytes: as of CostModel.collective. back: it is of the gradient, beside the products that make the
    operand's gradient. whole: bytes of the whole tensor. The devices that do not share rows share the columns if the
    tensor is read, and the contraction if it is made: no product of the strategy is shorter.
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
    if kind == "reduce_scatter":  # what has arrived is read, and added to the next part: read and written
        work = work + model.compute("memory", products[0].dtype, 0.0, 3 * nbytes / ways)
    return np.asarray(np.maximum((ways - 1) * np.maximum(work, hop) + piece - full, 0.0))
