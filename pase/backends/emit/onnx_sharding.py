"""ONNX's multi-device annotations: converts a layout to a ShardingSpecProto and back, and validates annotations.

onnx.checker does not check these annotations, so ``check`` does. Where onnx.proto is not specific, this file uses the
following conventions. Shards of a tensor are numbered row-major: by axis, and within an axis by the entries of
``simple_sharding``, major to minor. ``device`` has one entry per shard: a device or, if several devices hold the shard,
a negative number that is a key of ``index_to_device_group_map``. A dim that is not sharded has no entry in
``sharded_dim``. Several ``simple_sharding`` of one axis are the factors of a merged dim, major to minor. For example,
(p h) with h split has 1 shard of p, then n shards of h.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, Digit

if TYPE_CHECKING:
    from onnx import ModelProto, ShardingSpecProto

__all__ = ["check", "factors", "from_spec", "to_spec"]


def factors(
    shape: Sequence[int], layout: AxisLayout, mesh: Mesh
) -> dict[int, list[tuple[int, tuple[int, ...]]]]:
    """dim -> its factors, major to minor, each (extent, mesh axes that split it). Dims that are not split are left out.

    >>> mesh = Mesh(names=("x", "y"), sizes=(2, 4))
    >>> factors((8, 6), AxisLayout([(0, 2), (0, 8)]), mesh), factors((8, 6), AxisLayout.whole(mesh), mesh)
    ({0: [(8, (0, 1))]}, {})
    >>> factors((24,), AxisLayout([(0, 6), None]), mesh)
    {0: [(3, ()), (8, (0,))]}
    """
    out: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for dim, extent in enumerate(shape):
        mine = layout.along(dim)
        entries: list[tuple[int, list[int]]] = []
        cut = 1
        for blocks, a in mine:
            gap, rest = divmod(blocks, cut * mesh.sizes[a])
            if rest or gap < 1:
                raise PaseError(
                    f"mesh axis {mesh.names[a]} splits dim {dim} across the parts of another axis",
                    where=f"tensor of shape {list(shape)}",
                )
            if gap > 1 or not entries:
                if entries:  # the previous factor ends here; it includes the elements that no axis splits
                    entries[-1] = (entries[-1][0] * gap, entries[-1][1])
                elif gap > 1:
                    entries.append((gap, []))
                entries.append((mesh.sizes[a], [a]))
            else:
                entries[-1] = (entries[-1][0] * mesh.sizes[a], [*entries[-1][1], a])
            cut = blocks
        if mine:
            entries[-1] = (entries[-1][0] * (extent // cut), entries[-1][1])
            out[dim] = [(n, tuple(axes)) for n, axes in entries]
    return out


def _coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    """Device number -> its coordinates on the mesh, row-major."""
    return list(itertools.product(*(range(n) for n in mesh.sizes)))


def to_spec(name: str, shape: Sequence[int], layout: AxisLayout, mesh: Mesh) -> ShardingSpecProto:
    """The ShardingSpecProto of a tensor of this shape in this layout."""
    import onnx

    spec = onnx.ShardingSpecProto(tensor_name=name)
    cut = factors(shape, layout, mesh)
    order: list[int] = []  # mesh axes, in the order in which they number the shards
    for dim, entries in cut.items():
        sharded = spec.sharded_dim.add(axis=dim)
        for extent, axes in entries:
            ways = math.prod(mesh.sizes[a] for a in axes)
            sharded.simple_sharding.add(dim_value=extent, num_shards=ways)
            order += axes
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(_coordinates(mesh)):
        holders.setdefault(tuple(at[a] for a in order), []).append(device)
    for k, (_, devices) in enumerate(sorted(holders.items())):
        if len(devices) == 1:
            spec.device.append(devices[0])
        else:
            spec.device.append(-k - 1)
            spec.index_to_device_group_map.add(key=-k - 1, value=devices)
    return spec


def from_spec(spec: ShardingSpecProto, mesh: Mesh) -> AxisLayout:
    """The layout of a ShardingSpecProto. Raises PaseError if no assignment of mesh axes to dims gives it."""
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    ways = [(d.axis, s.dim_value, s.num_shards) for d in spec.sharded_dim for s in d.simple_sharding]
    shard_of = {device: k for k, entry in enumerate(spec.device) for device in groups.get(entry, [entry])}
    place = {at: device for device, at in enumerate(_coordinates(mesh))}
    origin = (0,) * len(mesh.sizes)

    def entry_of(shard: int) -> list[int]:
        out = []
        for _, _, n in reversed(ways):
            shard, r = divmod(shard, n)
            out.append(r)
        return out[::-1]

    digits: list[Digit | None] = []
    try:
        zero = entry_of(shard_of[place[origin]])
        for a, size in enumerate(mesh.sizes):
            if size == 1:
                digits.append(None)
                continue
            one = entry_of(shard_of[place[(*origin[:a], 1, *origin[a + 1 :])]])
            moved = [i for i, (x, y) in enumerate(zip(zero, one, strict=True)) if x != y]
            if not moved:
                digits.append(None)
                continue
            (i,) = moved
            axis, _, n = ways[i]
            before = math.prod(e for d, e, _ in ways[:i] if d == axis)
            digits.append(Digit(axis, before * n // (one[i] - zero[i])))
        shape = {d: math.prod(e for x, e, _ in ways if x == d) for d, _, _ in ways}
        full = [shape.get(i, 1) for i in range(max(shape, default=-1) + 1)]
        again = to_spec(spec.tensor_name, full, AxisLayout(digits), mesh)
    except (KeyError, ValueError, ZeroDivisionError) as e:
        raise PaseError(
            f"its sharding is not a layout on the mesh {mesh.sizes}", where=f"tensor '{spec.tensor_name}'"
        ) from e
    if again != spec:
        raise PaseError(
            f"its sharding is not a layout on the mesh {mesh.sizes}", where=f"tensor '{spec.tensor_name}'"
        )
    return AxisLayout(digits)


def check(model: ModelProto, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
    """Raise PaseError unless a ModelProto's multi-device annotations are sound.

    shapes: known shapes of tensors, in addition to those that the model declares.
    """
    configurations: dict[str, int] = {}
    for conf in model.configuration:
        if not conf.name or conf.name in configurations:
            raise PaseError(
                "its name is missing or already used", where=f"device configuration '{conf.name}'"
            )
        if conf.num_devices < 1 or (conf.device and len(conf.device) != conf.num_devices):
            raise PaseError(
                f"it has {conf.num_devices} devices, but names {len(conf.device)}",
                where=f"device configuration '{conf.name}'",
            )
        configurations[conf.name] = conf.num_devices
    if configurations and model.ir_version < 11:
        raise PaseError(
            f"device configurations need IR version 11, but the model has {model.ir_version}",
            where="ir_version",
        )
    known = dict(shapes or {})
    for v in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        dims = v.type.tensor_type.shape.dim
        if v.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            known.setdefault(v.name, [d.dim_value for d in dims])
    for t in model.graph.initializer:
        known.setdefault(t.name, list(t.dims))
    for i, node in enumerate(model.graph.node):
        for conf in node.device_configurations:
            where = f"node {i} ({node.op_type} '{node.name}')"
            if conf.configuration_id not in configurations:
                raise PaseError(f"there is no device configuration '{conf.configuration_id}'", where=where)
            if len({s.tensor_name for s in conf.sharding_spec}) != len(conf.sharding_spec):
                raise PaseError("a tensor is sharded twice in one configuration", where=where)
            for spec in conf.sharding_spec:
                if spec.tensor_name not in (*node.input, *node.output):
                    raise PaseError(
                        f"'{spec.tensor_name}' is neither an input nor an output of the node", where=where
                    )
                _check_spec(spec, configurations[conf.configuration_id], known.get(spec.tensor_name), where)


def _check_spec(spec: ShardingSpecProto, devices: int, shape: Sequence[int] | None, where: str) -> None:
    where = f"{where}: tensor '{spec.tensor_name}'"
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    held = [d for entry in spec.device for d in groups.get(entry, [entry])]
    if any(not 0 <= d < devices for d in held):
        raise PaseError(
            f"there is no device {next(d for d in held if not 0 <= d < devices)} among {devices} devices",
            where=where,
        )
    if len(set(held)) != len(held):
        raise PaseError("a device holds two shards", where=where)
    seen: set[int] = set()
    shards = 1
    for dim in spec.sharded_dim:
        if not dim.HasField("axis") or not dim.simple_sharding:
            raise PaseError("a sharded dim has no axis, or no shards", where=where)
        axis = dim.axis
        if shape is not None:
            if not -len(shape) <= axis < len(shape):
                raise PaseError(f"axis {axis} is out of range for a tensor of {len(shape)} dims", where=where)
            axis %= len(shape)
        if axis in seen:
            raise PaseError(f"axis {axis} is sharded twice", where=where)
        seen.add(axis)
        extent = 1
        for s in dim.simple_sharding:
            if s.num_shards < 1 or (s.HasField("dim_value") and s.dim_value % s.num_shards):
                raise PaseError(
                    f"{s.dim_value} elements cannot be divided into {s.num_shards} shards", where=where
                )
            shards *= s.num_shards
            extent = extent * s.dim_value if s.HasField("dim_value") else 0
        if shape is not None and extent and shape[axis] != extent:
            raise PaseError(
                f"axis {axis} has {shape[axis]} elements, but its sharding is for {extent}", where=where
            )
    if spec.sharded_dim and len(spec.device) != shards:
        raise PaseError(
            f"{shards} shards do not match {len(spec.device)} devices or groups of devices", where=where
        )
