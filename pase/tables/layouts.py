"""Configs and the layouts that they give tensors, as integer arrays.

A config assigns each mesh axis to an iteration dim of the node, or to none (the axis replicates). Axes on
one dim split it in mesh order, major to minor.

A layout is, per mesh axis, a *state*: which digit of which tensor dim the axis selects, ``REPLICATED``,
``PARTIAL`` (the shards still have to be summed) or ``PENDING`` (a copy whose gradient may stay partial).
A digit is (tensor dim, stride): index // stride % size of the axis. Two layouts place elements alike exactly
where their states are equal, however dims were merged or split; counts alone cannot say that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Node, Op, Tensor
from pase.ir.sizes import Size
from pase.machine import Mesh

__all__ = [
    "NOT_SPLIT",
    "PARTIAL",
    "PENDING",
    "REPLICATED",
    "axis_bits",
    "configs",
    "number",
    "read_states",
    "shards",
    "write_states",
]

NOT_SPLIT = -1
REPLICATED, PARTIAL, PENDING = -1, -2, -3
_DIM = 1 << 44  # strides stay below it

_MAX_CONFIGS = 1 << 17


def number(size: Size, what: str) -> int:
    """The size as an integer; a symbolic one is an error that says how to bind it."""
    if isinstance(size, int):
        return size
    raise PaseError(f"{what} has the symbolic size {size}: bind it first, graph.bind({size}=…)")


def configs(node: Node, mesh: Mesh) -> np.ndarray:
    """All configs of the node: int8 [K, axes], entries index ``node.space.dims`` or are NOT_SPLIT.

    A dim is split only evenly, and a windowed one only where the halo comes from the next shard.
    The first config is the replicated one.
    """
    choices: list[list[int]] = []
    for size in mesh.sizes:
        fits = [
            i for i, d in enumerate(node.space)
            if d.kind == "pending" or (d.kind in ("parallel", "reduction") and number(d.size, node.name) % size == 0)
        ]  # fmt: skip
        choices.append([NOT_SPLIT, *fits] if size > 1 else [NOT_SPLIT])
    if np.prod([len(c) for c in choices], dtype=float) > _MAX_CONFIGS:
        raise PaseError(
            f"node '{node.name}' has over {_MAX_CONFIGS} configs on the mesh {mesh.sizes}: use fewer, larger mesh axes"
        )
    out = np.array(list(itertools.product(*choices)), dtype=np.int8).reshape(-1, len(mesh.sizes))
    keep = np.ones(len(out), dtype=bool)
    limit = _most_ways(node)
    for i, d in enumerate(node.space):
        if d.kind in ("parallel", "reduction"):
            ways = shards(out, [i], mesh)
            keep &= (int(d.size) % ways == 0) & (ways <= limit.get(d.name, int(d.size)))
    return out[keep]


def _most_ways(node: Node) -> dict[str, int]:
    """dim -> the most shards that leave each at least a halo of its neighbour's elements."""
    out: dict[str, int] = {}
    for op in node.ops:
        for a in op.reads:
            for w in a.map.walks:
                if w.window is not None and len(w.dims) == 1:
                    elements = number(node.space[w.dims[0]].size, node.name) * w.window.stride
                    out[w.dims[0]] = max(elements // max(w.window.halo, 1), 1)
    return out


def shards(cfg: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Into how many shards these dims together are split: int64 [K]."""
    out = np.ones(len(cfg), dtype=np.int64)
    for a, size in enumerate(mesh.sizes):
        out[np.isin(cfg[:, a], dims)] *= size
    return out


def axis_bits(cfg: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """The axes that split these dims, as bit sets: int64 [K]."""
    out = np.zeros(len(cfg), dtype=np.int64)
    for a in range(len(mesh.sizes)):
        out[np.isin(cfg[:, a], dims)] |= 1 << a
    return out


def dim_index(node: Node, names: Sequence[str]) -> list[int]:
    order = {d.name: i for i, d in enumerate(node.space)}
    return [order[n] for n in names]


def _digits(node: Node, access: Access, tensor: Tensor, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """States from the dims that the map walks alone: digit or REPLICATED, int64 [K, axes]."""
    states = np.full(cfg.shape, REPLICATED, dtype=np.int64)
    for t, (walk, extent) in enumerate(zip(access.map.walks, tensor.shape, strict=True)):
        minor = 1
        factors = dim_index(node, walk.dims)
        for i in reversed(factors):
            size = number(extent, tensor.name) if len(factors) == 1 else number(node.space.dims[i].size, node.name)
            left = np.full(len(cfg), size, dtype=np.int64)
            for a, ways in enumerate(mesh.sizes):
                on = cfg[:, a] == i
                left[on] //= ways
                states[on, a] = t * _DIM + minor * left[on]
            minor *= size
    return states


def write_states(node: Node, op: Op, access: Access, tensor: Tensor, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Layout of a written tensor: split dims that the op sums over leave it PARTIAL. int64 [K, axes]."""
    states = _digits(node, access, tensor, cfg, mesh)
    walked = set(access.map.dims)
    settled = any(a.tensor == access.tensor for o in node.ops for a in o.reads)  # summed inside the node
    summed = [] if settled else dim_index(node, [d for d in op.dims if d not in walked])
    pending = [i for i, d in enumerate(node.space) if d.kind == "pending"]
    states[(states == REPLICATED) & np.isin(cfg, summed)] = PARTIAL
    states[(states == REPLICATED) & np.isin(cfg, pending)] = PENDING
    return states


def read_states(node: Node, op: Op, access: Access, tensor: Tensor, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Layout that a read wants; PARTIAL marks the axes over which its gradient will have to be summed: those of
    split dims that the op works on and the map does not walk. int64 [K, axes]."""
    states = _digits(node, access, tensor, cfg, mesh)
    walked = set(access.map.dims)
    other = dim_index(node, [d for d in op.dims if d not in walked])
    other += [i for i, d in enumerate(node.space) if d.kind == "pending"]
    states[(states == REPLICATED) & np.isin(cfg, other)] = PARTIAL
    return states


def tensor_dim(state: int) -> int:
    """The tensor dim of a digit."""
    return state // _DIM


def stride_of(state: int) -> int:
    return state % _DIM
