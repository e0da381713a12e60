"""Helper: runs a linear loop nest by its access maps alone, as an einsum of numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pase.ir import Node
from pase.ir.types import LEAF


def evaluated(node: Node, *arrays: np.ndarray) -> np.ndarray:
    """The sum over the dims that are not written of the products of what is read. The node has one op, one result and
    no windows."""
    (op,) = node.ops
    sizes = {d.name: int(d.size) for d in node.space}  # type: ignore[call-overload]
    letters = {name: chr(ord("a") + i) for i, name in enumerate(sizes)}
    (write,) = op.writes
    terms: list[str] = []
    values: list[np.ndarray] = []
    for access, array in zip(op.reads, arrays, strict=True):
        assert array.shape == tuple(math.prod(sizes[d] for d in w.dims) for w in access.map.walks)
        terms.append("".join(letters[d] for d in access.map.dims))
        values.append(array.reshape([sizes[d] for d in access.map.dims]))
    read = {d for a in op.reads for d in a.map.dims}
    for d in write.map.dims:
        if d not in read:  # a dim that only the result has
            terms.append(letters[d])
            values.append(np.ones(sizes[d]))
    out = np.einsum(f"{','.join(terms)}->{''.join(letters[d] for d in write.map.dims)}", *values)
    return out.reshape([math.prod(sizes[d] for d in w.dims) for w in write.map.walks])


def numbers(*shape: int) -> np.ndarray:
    """Random numbers that depend on the shape only."""
    return np.random.default_rng(shape).normal(size=shape)


def kinds(node: Node, kind: str) -> Sequence[str]:
    """The dims of this kind."""
    return [d.name for d in node.space if d.kind == kind]


def results(nodes: Iterable[Node], given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensor -> its value, for a graph of linear loop nests. given: the values of the parameters and inputs."""
    known = dict(given)
    for n in nodes:
        if n.kind not in LEAF:
            known[n.ops[0].writes[0].tensor] = evaluated(n, *(known[a.tensor] for a in n.ops[0].reads))
    return known
