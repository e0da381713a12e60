"""The registry of baselines, and the baselines that split by batch. To add one, decorate a generator with ``rule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pase.baselines.flow import Roles, roles
from pase.baselines.masks import by_batch, free, most, no_batch, only, state_apart, stored_apart
from pase.baselines.types import Allow, Intent, Skipped
from pase.ir import Graph, Node
from pase.machine import Machine, Mesh, level_ways
from pase.registry import Registry
from pase.tables.layouts import NOT_SPLIT

__all__ = ["RULES", "BaselineRule", "names", "rule"]

BaselineRule = Callable[[Graph, int, Machine], Iterator[Intent | Skipped]]
RULES = Registry[BaselineRule]("baseline", package="pase.baselines")
"""(graph, devices, machine) -> a baseline's intents, or why there are none. Files in the package register
themselves."""


def rule(name: str, *, rank: int = 9) -> Callable[[BaselineRule], BaselineRule]:
    """Returns a decorator that registers a baseline. rank: its position in tables."""
    return RULES.register(name, rank=rank)


def names() -> list[str]:
    """The names of all baselines.

    >>> names()
    ['data_parallel', 'zero2', 'fsdp', 'hsdp', 'owt', 'expert', 'megatron']
    """
    return list(RULES)


@rule("data_parallel", rank=0)
def data_parallel(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """The batch split over all devices, with parameters replicated."""
    r = roles(graph)
    why = no_batch(graph, r, devices)
    if why:
        yield Skipped(name="data_parallel", reason=why)
        return

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return only(cfg, [0], [NOT_SPLIT])
        return by_batch(r, node, cfg, mesh, [0])

    yield Intent(
        name="data_parallel", mesh=Mesh(names=("data",), sizes=(devices,)), allow=allow, alike=r.alike
    )


@rule("zero2", rank=1)
def zero2(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """ZeRO-2 (Rajbhandari et al. 2020): data parallelism in which each device has a shard of the gradients and of the
    optimizer state. ZeRO-1 sends the same bytes and keeps whole gradients, so it only needs more memory."""
    r = roles(graph)
    why = no_batch(graph, r, devices)
    if not any(t.needs_grad for t in graph.parameters):
        why = "nothing is trained, so there are neither gradients nor optimizer state"
    if why:
        yield Skipped(name="zero2", reason=why)
        return

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        return state_apart(node, cfg, [0]) if node.kind == "parameter" else by_batch(r, node, cfg, mesh, [0])

    yield Intent(name="zero2", mesh=Mesh(names=("data",), sizes=(devices,)), allow=allow, alike=r.alike)


@rule("fsdp", rank=2)
def fsdp(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """ZeRO-3 (Rajbhandari et al. 2020): the batch and the storage of each parameter are split over all devices."""
    r = roles(graph)
    why = no_batch(graph, r, devices)
    if why:
        yield Skipped(name="fsdp", reason=why)
        return
    yield Intent(
        name="fsdp", mesh=Mesh(names=("data",), sizes=(devices,)), allow=_sharded(r, [0], [0]), alike=r.alike
    )


@rule("hsdp", rank=3)
def hsdp(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Hybrid FSDP: the batch over all devices, parameters split within a node and replicated across nodes."""
    r = roles(graph)
    inner = level_ways(devices, machine)[0]
    why = no_batch(graph, r, devices)
    if inner in (1, devices):
        why = f"the {devices} devices of {machine.name} have a single link level, so this would be fsdp"
    if why:
        yield Skipped(name="hsdp", reason=why)
        return
    mesh = Mesh(names=("node", "data"), sizes=(devices // inner, inner))
    yield Intent(
        name=f"hsdp_{mesh.sizes[0]}x{inner}", mesh=mesh, allow=_sharded(r, [0, 1], [1]), alike=r.alike
    )


def _sharded(r: Roles, data: Sequence[int], stored: Sequence[int]) -> Allow:
    """Data parallelism over the axes ``data``, with parameters stored split over the axes ``stored``."""
    whole = [a for a in data if a not in stored]

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return stored_apart(node, cfg, mesh, stored) & only(cfg, whole, [NOT_SPLIT])
        return by_batch(r, node, cfg, mesh, data)

    return allow


@rule("owt", rank=4)
def owt(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """One weird trick (Krizhevsky 2014): convolutions split by batch, fully-connected layers by out-channel."""
    r = roles(graph)
    convs = sum(w.op.kind == "conv" for w in r.weights)
    full = [w for w in r.weights if w.op.kind == "matmul"]
    why = no_batch(graph, r, devices)
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
        f"{size} out-channels are not divisible by {devices}, so this layer is split by batch"
        for size in dict.fromkeys(uneven)
    )

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            mine = r.dims(node, readers.get(node.name, out))
            allowed = only(cfg, [0], [NOT_SPLIT, *mine])
            return most(cfg, allowed, mine, mesh) if node.name in readers else allowed
        if node.name in after:
            mine = r.dims(node, after[node.name])
            split = only(cfg, [0], mine)
            return split if split.any() else by_batch(r, node, cfg, mesh, [0])
        if node.name in dense:
            return only(cfg, [0], [*r.dims(node, out), *r.dims(node, r.batch), *free(node)])
        return by_batch(r, node, cfg, mesh, [0])

    mesh = Mesh(names=("devices",), sizes=(devices,))
    yield Intent(name="owt", mesh=mesh, allow=allow, notes=notes)


@rule("expert", rank=5)
def expert(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Expert parallelism (GShard, Lepikhin et al. 2020): experts over all devices, everything else by batch."""
    r = roles(graph)
    own = {w.parameter for w in r.weights if r.experts & set(w.shared)}
    products = {w.node for w in r.weights if w.parameter in own}
    sizes = r.sizes(graph, r.experts)
    why = no_batch(graph, r, devices) if own else "no weights belong to experts"
    if why is None and any(size % devices for size in sizes):
        why = f"the numbers of experts ({', '.join(map(str, sizes))}) are not all divisible by {devices}"
    if why:
        yield Skipped(name="expert", reason=why)
        return

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        mine = r.dims(node, r.experts)
        if node.name in own or node.name in products:
            return only(cfg, [0], mine)
        if node.kind == "parameter":
            return only(cfg, [0], [NOT_SPLIT])
        if mine:  # between the experts and the rest, the all-to-all goes wherever it is cheapest
            return only(cfg, [0], [*mine, *r.dims(node, r.batch)])
        return by_batch(r, node, cfg, mesh, [0])

    yield Intent(name="expert", mesh=Mesh(names=("devices",), sizes=(devices,)), allow=allow)


def _downstream(graph: Graph, start: set[str]) -> set[str]:
    """Nodes that depend on these nodes, directly or indirectly."""
    seen = set(start)
    for n in graph.nodes:  # in execution order, except for loop carries
        if any(a.tensor in graph.producer and graph.producer[a.tensor].name in seen for _, a in n.reads):
            seen.add(n.name)
    return seen
