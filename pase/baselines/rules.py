"""The methods. To add one: a generator of intents with one decorator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pase.baselines.flow import Roles, roles
from pase.baselines.types import Allow, Intent, Skipped
from pase.ir import Graph, Node
from pase.machine import Machine, Mesh, axis_levels, level_ways
from pase.tables.layouts import NOT_SPLIT, number, shards

__all__ = ["PERSISTENT_ELEMENTS", "Rule", "names", "rule", "rules"]

Rule = Callable[[Graph, int, Machine], Iterator[Intent | Skipped]]
_rules: dict[str, Rule] = {}

PERSISTENT_ELEMENTS = 100_000
"""ZeRO-3 need not split parameters of fewer elements: DeepSpeed's stage3_param_persistence_threshold."""


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a method: (graph, devices, machine) -> its intents, or why there are none."""

    def add(function: Rule) -> Rule:
        if name in _rules:
            raise ValueError(f"baseline '{name}' is registered twice")
        _rules[name] = function
        return function

    return add


def names() -> list[str]:
    """Names of all methods, in order of registration.

    >>> names()
    ['data_parallel', 'fsdp', 'hsdp', 'owt', 'megatron']
    """
    return list(_rules)


def rules() -> dict[str, Rule]:
    """All methods by name."""
    return dict(_rules)


# -- masks over configs --


def _only(cfg: np.ndarray, axes: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    """bool [K]: these axes split these dims (or NOT_SPLIT, where listed) and no other."""
    return np.asarray(np.isin(cfg[:, list(axes)], list(dims)).all(axis=1))


def _most(cfg: np.ndarray, allowed: np.ndarray, dims: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Of the allowed configs, those that split these dims most."""
    ways = np.where(allowed, shards(cfg, dims, mesh), 0)
    return allowed & (ways == ways.max(initial=0))


def _free(node: Node) -> list[int]:
    """What an axis may do that splits nothing: replicate, or leave a copy's gradient to be summed later."""
    return [NOT_SPLIT, *(i for i, d in enumerate(node.space) if d.kind == "pending")]


def _by_batch(r: Roles, node: Node, cfg: np.ndarray, mesh: Mesh, axes: Sequence[int]) -> np.ndarray:
    """The batch over these axes, as far as the node has one that can be split."""
    batch = r.dims(node, r.batch)
    split = [mesh.sizes[a] for a in axes]
    allowed = np.ones(len(cfg), dtype=bool)
    for a in axes:
        allowed &= _only(cfg, [a], [*batch, *_free(node)])
    if not split or not batch:
        return allowed
    ways = np.where(allowed, _ways(cfg, batch, axes, mesh), 0)
    return allowed & (ways == ways.max(initial=0))


def _ways(cfg: np.ndarray, dims: Sequence[int], axes: Sequence[int], mesh: Mesh) -> np.ndarray:
    """Into how many shards these axes alone split these dims: int64 [K]."""
    out = np.ones(len(cfg), dtype=np.int64)
    for a in axes:
        out[np.isin(cfg[:, a], dims)] *= mesh.sizes[a]
    return out


def _elements(node: Node) -> int:
    return math.prod(number(d.size, node.name) for d in node.space if d.kind == "parallel")


def _stored_apart(node: Node, cfg: np.ndarray, mesh: Mesh, axes: Sequence[int]) -> np.ndarray:
    """A parameter over all of these axes on the largest dim that takes them; a small one may stay whole."""
    whole = _only(cfg, axes, [NOT_SPLIT])
    order = sorted(range(len(node.space.dims)), key=lambda i: -number(node.space.dims[i].size, node.name))
    for i in order:
        on = _only(cfg, axes, [i])
        if on.any():
            return on | whole if _elements(node) < PERSISTENT_ELEMENTS else on
    return whole


# -- what the devices and the batch allow --


def _batch_size(graph: Graph, r: Roles) -> int:
    sizes = r.sizes(graph, r.batch)
    return math.gcd(*sizes) if sizes else 1


def _no_batch(graph: Graph, r: Roles, ways: int) -> str | None:
    if not r.batch:
        return "the model has no input with a batch dim"
    size = _batch_size(graph, r)
    return None if size % ways == 0 else f"a batch of {size} does not divide by {ways}"


def _fits(mesh: Mesh, machine: Machine) -> bool:
    """Does every axis cover whole factors of the machine's link levels?"""
    ways = level_ways(mesh.devices, machine)
    below = 1
    bounds = []
    for w in ways:
        below *= w
        bounds.append(below)
    levels = axis_levels(mesh, machine)
    if any(math.prod(row) != size for row, size in zip(levels, mesh.sizes, strict=True)):
        return False
    per_level = [math.prod(row[level] for row in levels) for level in range(len(ways))]
    return tuple(per_level) == tuple(ways)


# -- the methods --


@rule("data_parallel")
def data_parallel(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """The batch over all devices, parameters on every device."""
    r = roles(graph)
    why = _no_batch(graph, r, devices)
    if why:
        yield Skipped(name="data_parallel", reason=why)
        return

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return _only(cfg, [0], [NOT_SPLIT])
        return _by_batch(r, node, cfg, mesh, [0])

    yield Intent(name="data_parallel", mesh=Mesh(names=("data",), sizes=(devices,)), allow=allow)


@rule("fsdp")
def fsdp(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """ZeRO-3 (Rajbhandari et al. 2020): the batch over all devices, and so is each parameter's storage."""
    r = roles(graph)
    why = _no_batch(graph, r, devices)
    if why:
        yield Skipped(name="fsdp", reason=why)
        return
    yield Intent(name="fsdp", mesh=Mesh(names=("data",), sizes=(devices,)), allow=_sharded(r, [0], [0]))


@rule("hsdp")
def hsdp(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Hybrid FSDP: the batch over all devices, parameters split within a node and repeated across nodes."""
    r = roles(graph)
    inner = level_ways(devices, machine)[0]
    why = _no_batch(graph, r, devices)
    if inner in (1, devices):
        why = f"{devices} devices of {machine.name} are one level of links: this would be fsdp"
    if why:
        yield Skipped(name="hsdp", reason=why)
        return
    mesh = Mesh(names=("node", "data"), sizes=(devices // inner, inner))
    yield Intent(name=f"hsdp_{mesh.sizes[0]}x{inner}", mesh=mesh, allow=_sharded(r, [0, 1], [1]))


def _sharded(r: Roles, data: Sequence[int], stored: Sequence[int]) -> Allow:
    whole = [a for a in data if a not in stored]

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return _stored_apart(node, cfg, mesh, stored) & _only(cfg, whole, [NOT_SPLIT])
        return _by_batch(r, node, cfg, mesh, data)

    return allow


@rule("owt")
def owt(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """One weird trick (Krizhevsky 2014): convolutions by batch, fully-connected layers by out-channel."""
    r = roles(graph)
    convs = sum(w.op.kind == "conv" for w in r.weights)
    full = [w for w in r.weights if w.op.kind == "matmul"]
    why = _no_batch(graph, r, devices)
    if convs <= len(full) or not full:
        why = f"not a convolutional network: {convs} convolutions, {len(full)} fully-connected layers"
    if why:
        yield Skipped(name="owt", reason=why)
        return
    out = frozenset(c for w in full for c in w.out)
    before = {w.node for w in r.weights if w.op.kind == "conv"}
    after = {w.node: frozenset(w.out) for w in full}
    readers = {w.parameter: frozenset(w.out) for w in full}
    dense = _downstream(graph, set(after)) - before
    uneven = [
        int(d.size)
        for w in full
        for d in graph.node[w.node].space
        if r.classes[w.node, d.name] in w.out and int(d.size) % devices
    ]
    notes = tuple(
        f"{size} out-channels do not divide by {devices}: by batch" for size in dict.fromkeys(uneven)
    )

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            mine = r.dims(node, readers.get(node.name, out))
            allowed = _only(cfg, [0], [NOT_SPLIT, *mine])
            return _most(cfg, allowed, mine, mesh) if node.name in readers else allowed
        if node.name in after:
            mine = r.dims(node, after[node.name])
            split = _only(cfg, [0], mine)
            return split if split.any() else _by_batch(r, node, cfg, mesh, [0])
        if node.name in dense:
            return _only(cfg, [0], [*r.dims(node, out), *r.dims(node, r.batch), *_free(node)])
        return _by_batch(r, node, cfg, mesh, [0])

    mesh = Mesh(names=("devices",), sizes=(devices,))
    yield Intent(name="owt", mesh=mesh, allow=allow, notes=notes)


def _downstream(graph: Graph, start: set[str]) -> set[str]:
    """Nodes fed by these, directly or not."""
    seen = set(start)
    for n in graph.nodes:  # in order, but for loop carries
        if any(a.tensor in graph.producer and graph.producer[a.tensor].name in seen for _, a in n.reads):
            seen.add(n.name)
    return seen


@rule("megatron")
def megatron(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Tensor parallelism within data parallelism (Shoeybi et al. 2019), each degree, with and without
    sequence parallelism (Korthikanti et al. 2022): ``megatron_8x4`` is data 8 × model 4.

    Heads, hidden units and vocabulary go over the model axes. Fewer heads (or key-value heads) than model
    devices are split as far as they go, on a mesh with two model axes, and repeated beyond.
    """
    r = roles(graph)
    if r.model is None or not r.tensor:
        yield Skipped(name="megatron", reason="no dim runs through most weights, as a model dim would")
        return
    for degree in (t for t in range(2, devices + 1) if devices % t == 0):
        data = devices // degree
        label = f"{data}x{degree}"
        why = _no_batch(graph, r, data)
        if why:
            yield Skipped(name=f"megatron_{label}", reason=why)
            continue
        sizes, inside = r.sizes(graph, r.tensor), r.sizes(graph, r.tensor - r.ends)
        if not any(size % degree == 0 for size in sizes):
            yield Skipped(
                name=f"megatron_{label}",
                reason=f"none of its heads, hidden units and vocabularies ({sizes}) divides by {degree}",
            )
            continue
        meshes = [m for m in _model_meshes(data, degree, inside) if _fits(m, machine)]
        if not meshes:
            yield Skipped(
                name=f"megatron_{label}",
                reason=f"groups of {degree} are neither whole nodes of {machine.name} nor equal parts of one",
            )
            continue
        uneven = [s for s in sizes if s % degree]
        notes = tuple(f"a dim of {s} does not divide by {degree}: split less, or whole" for s in uneven)
        sequence = r.sizes(graph, r.sequence)
        for mesh in meshes:
            yield Intent(
                name=f"megatron_{label}", mesh=mesh, allow=_tensor_parallel(r, data, False), notes=notes
            )
            if any(s % degree == 0 for s in sequence):
                yield Intent(
                    name=f"megatron_sp_{label}", mesh=mesh, allow=_tensor_parallel(r, data, True), notes=notes
                )
        if not any(s % degree == 0 for s in sequence):
            yield Skipped(
                name=f"megatron_sp_{label}", reason=f"no sequence dim ({sequence}) divides by {degree}"
            )


def _model_meshes(data: int, degree: int, sizes: Sequence[int]) -> Iterator[Mesh]:
    """One model axis, or two where a dim divides by a part of the degree alone."""
    outer = ((("data",), (data,)),) if data > 1 else (((), ()),)
    for names_, sizes_ in outer:
        yield Mesh(names=(*names_, "model"), sizes=(*sizes_, degree))
        parts = {math.gcd(s, degree) for s in sizes} - {1, degree}
        for part in sorted({*parts, *(degree // p for p in parts)}):
            yield Mesh(names=(*names_, "model", "model2"), sizes=(*sizes_, part, degree // part))


def _tensor_parallel(r: Roles, data: int, by_sequence: bool) -> Allow:
    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        axes = range(len(mesh.sizes))
        batch_axes = [0] if data > 1 else []
        model = [a for a in axes if a not in batch_axes]
        tensor, experts = r.dims(node, r.tensor), r.dims(node, r.experts)
        inside = r.dims(node, r.tensor - r.ends)
        if node.kind == "parameter":
            allowed = _only(cfg, batch_axes, [NOT_SPLIT])
            sequence: list[int] = []
        else:
            allowed = _by_batch(r, node, cfg, mesh, batch_axes)
            sequence = r.dims(node, r.sequence) if by_sequence and not inside else []
        allowed &= _only(cfg, model, [*tensor, *experts, *sequence, *_free(node)])
        if node.kind == "copy":
            return allowed
        if tensor:
            return _most(cfg, allowed, [*tensor, *experts], mesh)
        if sequence and node.kind in ("elementwise", "reduce", "carry"):
            return _most(cfg, allowed, sequence, mesh)
        return allowed

    return allow
