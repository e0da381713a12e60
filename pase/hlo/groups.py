"""Reads the device groups of a collective, in the three forms that XLA writes, and finds the mesh axes they span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pase.machine.types import Mesh

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["Groups", "axes_of_groups", "axes_of_pairs", "groups_of", "joined", "pairs_of"]

Groups = tuple[tuple[int, ...], ...]


def groups_of(i: Message) -> Groups:
    """Returns the device groups of an HloInstructionProto; empty if it spans all devices or is not a collective.

    XLA writes them in one of three forms: an explicit list, a transposed iota over given dims, or axes of a mesh.
    """
    if i.HasField("mesh_axes_replica_group_list"):
        return _over_mesh(i.mesh_axes_replica_group_list)
    counted = i.collective_device_list.iota_replica_group_list
    if i.HasField("iota_collective_device_list"):
        counted = i.iota_collective_device_list
    if counted.num_replica_groups:
        ids = _counted(counted.iota_reshape_dims, counted.iota_transpose_perm)
        return _tuples(ids.reshape(counted.num_replica_groups, counted.num_devices_per_group))
    listed = i.collective_device_list.replica_groups or i.replica_groups
    return tuple(tuple(g.replica_ids) for g in listed)


def pairs_of(i: Message) -> Groups:
    """Returns the (source, target) pairs of a collective-permute's HloInstructionProto."""
    return tuple((p.source, p.target) for p in i.source_target_pairs)


def _counted(dims: Sequence[int], perm: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(list(dims))
    return ids.transpose(list(perm)) if perm else ids


def _tuples(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def _over_mesh(listed: Message) -> Groups:
    """Returns groups along axes of a mesh, or along sub-axes: a sub-axis is the factor s of an axis p × s × rest."""
    mesh = listed.mesh
    sizes = [a.size for a in mesh.axes]
    if mesh.device_ids:
        ids = np.array(mesh.device_ids)
    elif mesh.HasField("iota_device_ids"):
        ids = _counted(mesh.iota_device_ids.dims, mesh.iota_device_ids.perm).reshape(-1)
    else:
        ids = np.arange(math.prod(sizes))
    used = [
        (a.mesh_axis_index, a.sub_axis_info.pre_size, a.sub_axis_info.size)
        if a.HasField("sub_axis_info")
        else (a.mesh_axis_index, 1, sizes[a.mesh_axis_index])
        for a in listed.axes
    ]
    # Split each axis that has sub-axes into its factors, so that every sub-axis becomes a dim.
    dims: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for axis, size in enumerate(sizes):
        cuts = sorted({1, size, *(c for a, pre, s in used if a == axis for c in (pre, pre * s))})
        for before, after in itertools.pairwise(cuts):
            place[axis, before] = len(dims)
            dims.append(after // before)
    walked = [d for axis, pre, s in used for (a, b), d in place.items() if a == axis and pre <= b < pre * s]
    others = [d for d in range(len(dims)) if d not in walked]
    ways = math.prod(dims[d] for d in walked)
    return _tuples(ids.reshape(dims).transpose([*others, *walked]).reshape(-1, ways))


def axes_of_groups(groups: Groups, mesh: Mesh) -> int | None:
    """Returns the bit set of mesh axes that have these groups, in any order; None if no set of axes has them.

    >>> axes_of_groups(((0, 2), (1, 3)), Mesh(names=("x", "y"), sizes=(2, 2)))
    1
    """
    wanted = {frozenset(g) for g in groups}
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    real = [i for i, s in enumerate(mesh.sizes) if s > 1]
    for k in range(len(real) + 1):
        for chosen in itertools.combinations(real, k):
            axes = sum(1 << i for i in chosen)
            rest = [i for i in range(len(mesh.sizes)) if i not in chosen]
            rows = ids.transpose([*rest, *chosen]).reshape(-1, mesh.ways(axes))
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return axes
    return None


def axes_of_pairs(pairs: Groups, mesh: Mesh) -> int | None:
    """Returns the bit set of mesh axes along which some source differs from its target.

    None if a device is not in the mesh.

    >>> axes_of_pairs(((0, 1), (1, 0)), Mesh(names=("x", "y"), sizes=(2, 2)))
    2
    """
    if any(d >= mesh.devices for pair in pairs for d in pair):
        return None
    axes = 0
    for source, target in pairs:
        at = zip(np.unravel_index(source, mesh.sizes), np.unravel_index(target, mesh.sizes), strict=True)
        axes |= sum(1 << i for i, (s, t) in enumerate(at) if s != t)
    return axes


def joined(pairs: Groups) -> Groups:
    """Returns the connected components of the (source, target) pairs, sorted.

    >>> joined(((2, 3), (0, 1), (1, 4)))
    ((0, 1, 4), (2, 3))
    """
    import networkx

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_edges_from((source, target) for source, target in pairs)
    return tuple(sorted(tuple(sorted(c)) for c in networkx.connected_components(graph)))
