"""Configs, and the layouts that they give tensors, as integer arrays.

A config assigns each mesh axis to an iteration dim of the node, or to none (the axis replicates). Several axes on
one dim split it in mesh order, major to minor.

A layout is a row of integers, one *state* for each mesh axis (``pase.tables.axis_layout``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Graph, Node, Op, Tensor
from pase.ir.sizes import Size
from pase.machine import Mesh
from pase.tables.axis_layout import (
    PARTIAL,
    PENDING,
    REPLICATED,
    AccessLayout,
    AxisLayout,
    digit_state,
    forward_states,
    gradient_states,
    state_digit,
    summed_states,
    tensor_dim,
)

__all__ = [
    "NOT_SPLIT",
    "LayoutRule",
    "RingDim",
    "access_rules",
    "axis_bits",
    "concrete_size",
    "configs",
    "dim_index",
    "local_bytes",
    "read_layout",
    "read_rule",
    "ring_of",
    "shards",
    "state_index",
    "write_layout",
    "write_rule",
    "written_and_read",
]

NOT_SPLIT = -1

_MAX_CONFIGS = 1 << 17
_MAX_DIMS = 128  # because a config is int8


def concrete_size(size: Size, what: str) -> int:
    """The size as an integer. PaseError if the size is symbolic. what: the name of what has it, for the message."""
    if isinstance(size, int):
        return size
    raise PaseError(
        f"the size {size} is symbolic", where=what, fix=f"bind it first with graph.bind({size}=…)"
    )


def configs(node: Node, mesh: Mesh) -> np.ndarray:
    """All configs of the node: int8 [K, axes]. Entries are indices into ``node.space.dims`` or NOT_SPLIT.

    A dim is split only evenly. A windowed dim is split only if the halo comes entirely from the next shard.
    The first config is the replicated one.
    """
    choices: list[list[int]] = []
    whole = within_groups(node)
    for size in mesh.sizes:
        fits = [
            i
            for i, d in enumerate(node.space)
            if d.kind in ("pending", "state")
            or (
                d.kind in ("parallel", "reduction")
                and i not in whole
                and concrete_size(d.size, node.name) % size == 0
            )
            or d.kind == "ring"
        ]
        choices.append([NOT_SPLIT, *fits] if size > 1 else [NOT_SPLIT])
    if np.prod([len(c) for c in choices], dtype=float) > _MAX_CONFIGS:
        raise PaseError(
            f"the node has over {_MAX_CONFIGS} configs on the mesh {mesh.sizes}",
            where=f"node '{node.name}'",
            fix="use fewer, larger mesh axes",
        )
    out = np.array(list(itertools.product(*choices)), dtype=np.int8).reshape(-1, len(mesh.sizes))
    keep = np.ones(len(out), dtype=bool)
    limit = _most_ways(node)
    for i, d in enumerate(node.space):
        if d.kind in ("parallel", "reduction"):
            ways = shards(out, [i], mesh)
            keep &= (int(d.size) % ways == 0) & (ways <= limit.get(d.name, int(d.size)))
    if (ring := ring_of(node)) is not None:
        ways = shards(out, [ring.dim], mesh)
        for i in (ring.queries, ring.keys):
            keep &= concrete_size(node.space.dims[i].size, node.name) % ways == 0
        keep &= (ways == 1) | (shards(out, [ring.queries], mesh) == 1)
    if state_index(node):
        keep &= _state_dim(out, node, mesh) != NOT_SPLIT
    for windowed, places in conv_places(node):
        halves = np.isin(out, list(windowed)).any(axis=1)
        idle = (~np.isin(out, list(places)) & (np.array(mesh.sizes) > 1)).any(axis=1)
        keep &= ~(halves & idle)
    for groups, others in depthwise(node):
        by_group, by_others = (np.isin(out, list(dims)).any(axis=1) for dims in (groups, others))
        idle = ((out == NOT_SPLIT) & (np.array(mesh.sizes) > 1)).any(axis=1)
        keep &= ~(by_group & ~by_others & idle)
    for major, minor in merged_in_storage(node):
        whole_major = shards(out, [major], mesh) == concrete_size(node.space.dims[major].size, node.name)
        keep &= whole_major | (shards(out, [minor], mesh) == 1)
    return out[keep]


@dataclass(frozen=True, kw_only=True)
class RingDim:
    """Index of an attention's 'ring' dim, and indices of the two dims of positions that it splits."""

    dim: int
    queries: int
    keys: int

    def balanced(self, node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """bool [K]: whether each device can take two chunks of the positions, at equal distance from the beginning and
        from the end. With a causal mask, all devices then have equal work."""
        positions = concrete_size(node.space.dims[self.queries].size, node.name)
        return np.asarray(positions % (2 * shards(cfg, [self.dim], mesh)) == 0)


def ring_of(node: Node) -> RingDim | None:
    """The node's ring dim; None if it has none."""
    found = [i for i, d in enumerate(node.space) if d.kind == "ring"]
    if not found:
        return None
    name = node.space.dims[found[0]].name
    q, k = (next(w.dims[-1] for w in a.map.walks if name in w.dims) for a in node.main.reads[:2])
    queries, keys = dim_index(node, (q, k))
    return RingDim(dim=found[0], queries=queries, keys=keys)


def state_index(node: Node) -> list[int]:
    """The index of the node's 'state' dim, as a list of one or zero entries."""
    return [i for i, d in enumerate(node.space) if d.kind == "state"]


def _state_dims(node: Node) -> tuple[tuple[int, int], ...]:
    """(dim, size) of the dims along which a parameter's gradient may be split, largest first.

    These are the dims that are outermost in every tensor that the node writes, so that shards are contiguous in all of
    these tensors.
    """
    sizes = {i: concrete_size(d.size, node.name) for i, d in enumerate(node.space) if d.kind == "parallel"}
    for op in node.ops:
        for a in op.writes:
            sizes = {i: s for i, s in sizes.items() if i in {w[0][0] for w in _walks(node, a) if w}}
    return tuple(sorted(sizes.items(), key=lambda p: (-p[1], p[0])))


def _state_dim(cfg: np.ndarray, node: Node, mesh: Mesh) -> np.ndarray:
    """The one dim that all axes of a config's 'state' dim split: int64 [K]; NOT_SPLIT if they divide no dim.

    All splits of the state that divide a dim evenly cost the same, so the largest such dim represents all of them.
    """
    return _divided_dim(cfg, state_index(node)[0], _state_dims(node), mesh)


def _divided_dim(cfg: np.ndarray, state: int, dims: Sequence[tuple[int, int]], mesh: Mesh) -> np.ndarray:
    """The first of ``dims`` that the axes of the state divide evenly in addition to the stored split: int64 [K]."""
    ways = shards(cfg, [state], mesh)
    out = np.full(len(cfg), NOT_SPLIT, dtype=np.int64)
    for i, size in reversed(dims):
        out[size % (shards(cfg, [i], mesh) * ways) == 0] = i
    return out


def conv_places(node: Node) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Per convolution: its windowed dims, and the union of its windowed and batch dims.

    If a windowed dim is split, every mesh axis must split one of the windowed or batch dims. XLA (jaxlib 0.10.2)
    returns the filter's gradient multiplied by the size of any axis that does not.
    ``tests/backends/jax/ops/test_convolution.py`` tests this.
    """
    out = []
    for op in node.ops:
        if op.kind == "conv":
            x, w = (a.map for a in op.reads)
            windowed = {d for walk in x.walks if walk.window is not None for d in walk.dims}
            batch = (set(x.dims) & set(op.writes[0].map.dims)) - set(w.dims)
            out.append(
                (
                    frozenset(dim_index(node, sorted(windowed))),
                    frozenset(dim_index(node, sorted(windowed | batch))),
                )
            )
    return [(windowed, places) for windowed, places in out if windowed]


def within_groups(node: Node) -> frozenset[int]:
    """Dims of channels within a group of a grouped convolution. They must not be split.

    In the tensors, the group is the major part of a dim and these dims are the minor part, so no sharding can express
    such a split alone. If XLA's partitioner (jaxlib 0.10.2) meets such a split, an internal check fails and ends the
    process ("new_input_batch_size % new_output_batch_size == 0"), or the shapes of a convolution do not match. The
    groups themselves must not be split if the filter is one element wide and a group has one channel on one side and
    several on the other: XLA treats one of the gradients as an ungrouped product ("Expected output feature dimension
    …"). ``bench/fuzz/xla.py`` tests this.
    """
    out: set[str] = set()
    for op in node.ops:
        if op.kind == "conv":
            x, w = (set(a.map.dims) for a in op.reads)
            made = set(op.writes[0].map.dims)
            if groups := x & w & made:
                read, written = (w & x) - groups, (w & made) - groups
                out |= read | written
                if w == groups | read | written and bool(read) != bool(written):
                    out |= groups
    return frozenset(dim_index(node, sorted(out)))


def merged_in_storage(node: Node) -> list[tuple[int, int]]:
    """(major, minor) pairs of adjacent dims within one dim of a stored tensor, which its readers view as separate dims.

    Stored shards are contiguous, so the minor dim may be split only if the major dim is split into single elements.
    """
    if node.kind not in ("parameter", "input"):
        return []
    walks = node.ops[0].writes[0].map.walks
    return [pair for walk in walks for pair in itertools.pairwise(dim_index(node, walk.dims))]


def depthwise(node: Node) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Per convolution whose groups are single channels: its groups, and its batch and windowed dims.

    If the groups are split, an axis is idle and no batch or windowed dim is split, XLA's partitioner (jaxlib 0.10.2)
    frees memory that it does not own, and the process ends ("free(): invalid pointer").
    ``tests/backends/jax/ops/test_convolution.py`` tests this.
    """
    out = []
    for op in node.ops:
        if op.kind == "conv":
            x, w, made = (set(a.map.dims) for a in (*op.reads, *op.writes))
            if (groups := x & w & made) and not (x & w) - groups:
                out.append(
                    (
                        frozenset(dim_index(node, sorted(groups))),
                        frozenset(dim_index(node, sorted((x & made) - groups))),
                    )
                )
    return out


def _most_ways(node: Node) -> dict[str, int]:
    """Dim -> the largest number of shards for which each shard still holds at least a halo of elements."""
    out: dict[str, int] = {}
    for op in node.ops:
        for a in op.reads:
            for w in a.map.walks:
                if w.window is not None and len(w.dims) == 1:
                    elements = concrete_size(node.space[w.dims[0]].size, node.name) * w.window.stride
                    out[w.dims[0]] = max(elements // max(w.window.halo, 1), 1)
    return out


def shards(cfg: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """The number of shards into which these dims are split together: int64 [K]."""
    out = np.ones(len(cfg), dtype=np.int64)
    factor = np.ones(_MAX_DIMS, dtype=np.int64)  # indexed by iteration dim; the last entry is for NOT_SPLIT
    for a, size in enumerate(mesh.sizes):
        factor[list(dims)] = size
        out *= factor[cfg[:, a]]
    return out


def local_bytes(node: Node, tensor: Tensor, access: Access, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Bytes of a tensor's shard on one device, as the access lays it out under each config: float64 [K]."""
    return concrete_size(tensor.nbytes, tensor.name) / shards(cfg, dim_index(node, access.map.dims), mesh)


def axis_bits(cfg: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """The axes that split these dims, as bit sets: int64 [K]."""
    out = np.zeros(len(cfg), dtype=np.int64)
    factor = np.zeros(_MAX_DIMS, dtype=np.int64)
    for a in range(len(mesh.sizes)):
        factor[list(dims)] = 1 << a
        out |= factor[cfg[:, a]]
    return out


def dim_index(node: Node, names: Sequence[str]) -> list[int]:
    """The indices of these iteration dims in the node."""
    order = {d.name: i for i, d in enumerate(node.space)}
    return [order[n] for n in names]


@dataclass(frozen=True, kw_only=True)
class LayoutRule:
    """How a config lays out a tensor. Rules of equal ops of repeated layers are equal, whatever the names are.

    walks: per tensor dim, major to minor, (iteration dim, number of blocks into which more major ones cut the dim).
    partial, pending: iteration dims whose axes leave the tensor PARTIAL or PENDING.
    state: the 'state' dim, if any. state_dims: (dim, size) of the dims that its axes may split; they split the first
    one that they divide evenly.
    """

    walks: tuple[tuple[tuple[int, int], ...], ...]
    partial: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    state: int | None = None
    state_dims: tuple[tuple[int, int], ...] = ()

    def states(self, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """The layouts, int64 [K, axes]. The array of a single config is read-only, because equal layers share it."""
        if len(cfg) == 1:
            return _states_of_one(self, tuple(cfg[0].tolist()), mesh)
        return self._states(cfg, mesh)

    def by_one_axis(self, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """bool [K]: whether each dim of the tensor, of its gradient and of its state is split by at most one axis."""
        states = gradient_states(self.states(cfg, mesh))
        # Each axis gets a different value, so that unsplit axes never look equal.
        unsplit = -1 - np.arange(len(mesh.sizes))
        dims = np.sort(np.where(states >= 0, tensor_dim(states), unsplit), axis=1)
        return np.asarray((np.diff(dims, axis=1) != 0).all(axis=1))

    def _states(self, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        out = np.full(cfg.shape, REPLICATED, dtype=np.int64)
        out[np.isin(cfg, self.pending)] = PENDING
        out[np.isin(cfg, self.partial)] = PARTIAL
        for t, walk in enumerate(self.walks):
            for i, major in walk:
                blocks = np.full(len(cfg), major, dtype=np.int64)
                for a, ways in enumerate(mesh.sizes):
                    on = cfg[:, a] == i
                    blocks[on] *= ways
                    out[on, a] = digit_state(t, blocks[on])
        if self.state is not None:
            dim_of_state = _divided_dim(cfg, self.state, self.state_dims, mesh)
            for t, walk in enumerate(self.walks):
                for i, _ in walk[:1]:
                    # The state is minor to the stored split, so that a gather moves no shard.
                    blocks = shards(cfg, [i], mesh)
                    for a, ways in enumerate(mesh.sizes):
                        on = (dim_of_state == i) & (cfg[:, a] == self.state)
                        blocks[on] *= ways
                        out[on, a] = state_digit(digit_state(t, blocks[on]))
        return out


@lru_cache(maxsize=1 << 14)
def _states_of_one(rule: LayoutRule, config: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The layout of a single config, cached."""
    out = rule._states(np.array([config], np.int8), mesh)
    out.setflags(write=False)
    return out


def _walks(node: Node, access: Access) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The walks of a layout rule: per tensor dim, (iteration dim, blocks of the more major ones)."""
    out = []
    for walk in access.map.walks:
        major, factors = 1, []
        for i in dim_index(node, walk.dims):
            factors.append((i, major))
            major *= concrete_size(node.space.dims[i].size, node.name)
        out.append(tuple(factors))
    return tuple(out)


def _not_walked(node: Node, op: Op, access: Access) -> tuple[int, ...]:
    """Iteration dims that the op works on but the access's map does not contain."""
    return tuple(dim_index(node, [d for d in op.dims if d not in access.map.dims]))


def _pending(node: Node) -> tuple[int, ...]:
    """Indices of the node's 'pending' dims."""
    return tuple(i for i, d in enumerate(node.space) if d.kind == "pending")


def access_rules(node: Node) -> Iterator[LayoutRule]:
    """The layout rules of all tensors that the node reads or writes."""
    for op in node.ops:
        yield from (read_rule(node, op, a) for a in op.reads)
        yield from (write_rule(node, op, a) for a in op.writes)


def write_rule(node: Node, op: Op, access: Access) -> LayoutRule:
    """The layout of a written tensor. Split dims that the op sums over leave it PARTIAL."""
    # A tensor that the node itself reads is already summed inside the node.
    reduced = any(a.tensor == access.tensor for o in node.ops for a in o.reads)
    summed = () if reduced else _not_walked(node, op, access)
    state = state_index(node)
    return LayoutRule(
        walks=_walks(node, access),
        partial=summed,
        pending=_pending(node),
        state=state[0] if state else None,
        state_dims=_state_dims(node) if state else (),
    )


def read_rule(node: Node, op: Op, access: Access) -> LayoutRule:
    """The layout that a read needs.

    PARTIAL marks the axes over which the gradient of the read must be summed: the axes of split dims that the op works
    on but the access's map does not contain.
    """
    return LayoutRule(walks=_walks(node, access), partial=(*_not_walked(node, op, access), *_pending(node)))


def write_layout(node: Node, op: Op, access: Access, config: np.ndarray, mesh: Mesh) -> AccessLayout:
    """How an op writes a tensor under one config, int8 [axes]."""
    states = write_rule(node, op, access).states(config[None, :], mesh)[0]
    return AccessLayout(
        layout=AxisLayout.of(forward_states(states)), gradient=AxisLayout.of(gradient_states(states))
    )


def read_layout(node: Node, op: Op, access: Access, config: np.ndarray, mesh: Mesh) -> AccessLayout:
    """How an op reads a tensor under one config, int8 [axes]."""
    gradient = AxisLayout.of(read_rule(node, op, access).states(config[None, :], mesh)[0])
    return AccessLayout(layout=gradient.summed, gradient=gradient)


def written_and_read(
    graph: Graph, node: Node, op: Op, access: Access, configs: Mapping[str, np.ndarray], mesh: Mesh
) -> tuple[np.ndarray, np.ndarray]:
    """The layouts in which a tensor is written and read under a strategy, int64 [axes]; a sum counts as arrived.

    node, op, access: the read. configs: node name -> int8 [axes].
    """
    source = graph.producer[access.tensor]
    written = write_rule(source, *source.write_of(access.tensor)).states(configs[source.name][None, :], mesh)
    read = read_rule(node, op, access).states(configs[node.name][None, :], mesh)
    return forward_states(written[0]), summed_states(read[0])
