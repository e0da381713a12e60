"""The registry of baselines, and the baselines that split by batch. To add one, decorate a generator with ``rule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pase.baselines.flow import Roles, roles
from pase.baselines.masks import (
    by_batch,
    fits,
    free,
    most,
    no_batch,
    only,
    state_apart,
    stored_apart,
    with_stored,
)
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
    ['data_parallel', 'zero2', 'fsdp', 'hsdp', 'owt', 'expert', 'megatron', 'context']
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

    mesh = Mesh(names=("data",), sizes=(devices,))
    yield Intent(name="zero2", mesh=mesh, allow=allow, alike=r.alike, stored=(0,))


@rule("fsdp", rank=2)
def fsdp(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """ZeRO-3 (Rajbhandari et al. 2020): the batch and the storage of each parameter are split over all devices."""
    r = roles(graph)
    why = no_batch(graph, r, devices)
    if why:
        yield Skipped(name="fsdp", reason=why)
        return
    mesh = Mesh(names=("data",), sizes=(devices,))
    yield Intent(name="fsdp", mesh=mesh, allow=_sharded(r, [0], [0]), alike=r.alike, stored=(0,))


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
    name = f"hsdp_{mesh.sizes[0]}x{inner}"
    yield Intent(name=name, mesh=mesh, allow=_sharded(r, [0, 1], [1]), alike=r.alike, stored=(1,))


def _sharded(r: Roles, data: Sequence[int], stored: Sequence[int]) -> Allow:
    """Data parallelism over the axes ``data``, with parameters stored split over the axes ``stored``."""
    whole = [a for a in data if a not in stored]

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return stored_apart(r, node, cfg, stored) & only(cfg, whole, [NOT_SPLIT])
        return with_stored(r, node, cfg, mesh, data, stored)

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
    """Expert parallelism (GShard, Lepikhin et al. 2020): experts over the devices, everything else by batch.

    With fewer experts than devices, ``expert_8x4`` has 8 groups of devices with all experts, over 4 devices each. In
    ``expert_fsdp_8x4`` all parameters and their state are also stored split over whatever axes are left (DeepSpeed-MoE,
    Rajbhandari et al. 2022, with ZeRO-3).
    """
    r = roles(graph)
    own = {w.parameter for w in r.weights if r.experts & set(w.shared)}
    sizes = r.sizes(graph, r.experts)
    degree = math.gcd(devices, *sizes)
    why = no_batch(graph, r, devices) if own else "no weights belong to experts"
    if why is None and degree == 1 < devices:
        why = (
            f"no group of the {devices} devices divides the numbers of experts ({', '.join(map(str, sizes))})"
        )
    if why:
        yield Skipped(name="expert", reason=why)
        return
    data = devices // degree
    mesh = Mesh(names=("data", "expert"), sizes=(data, degree))
    if data == 1:
        mesh = Mesh(names=("devices",), sizes=(devices,))
    label = "" if data == 1 else f"_{data}x{degree}"
    if data > 1 and not fits(mesh, machine):
        reason = (
            f"groups of {degree} devices are neither whole nodes of {machine.name} nor equal parts of one"
        )
        yield Skipped(name=f"expert{label}", reason=reason)
        return
    yield Intent(name=f"expert{label}", mesh=mesh, allow=_experts(r, own, stored=False))
    if any(t.needs_grad for t in graph.parameters):
        yield Intent(name=f"expert_fsdp{label}", mesh=mesh, allow=_experts(r, own, stored=True))


def _experts(r: Roles, own: set[str], *, stored: bool) -> Allow:
    """Experts over the last axis, and the batch over all. own: the experts' weights. stored: whether parameters are
    stored split over the axes that do not split them for compute."""
    products = {w.node for w in r.weights if w.parameter in own}

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        axes = list(range(len(mesh.sizes)))
        last, mine = axes[-1], r.dims(node, r.experts)
        if node.kind == "parameter":
            split = only(cfg, [last], mine) if node.name in own else np.ones(len(cfg), dtype=bool)
            rest = axes[:-1] if node.name in own else axes
            if not stored or not rest:
                return split & only(cfg, rest, [NOT_SPLIT])
            return split & stored_apart(r, node, cfg, rest, taken=mine)
        if node.name in products:
            return only(cfg, [last], mine) & by_batch(r, node, cfg, mesh, axes[:-1])
        if mine:  # between the experts and the rest, the all-to-all goes wherever it is cheapest
            return only(cfg, [last], [*mine, *r.dims(node, r.batch)]) & by_batch(
                r, node, cfg, mesh, axes[:-1]
            )
        return by_batch(r, node, cfg, mesh, axes)

    return allow


@rule("context", rank=7)
def context(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Context parallelism within FSDP, for batches with fewer sequences than devices: each sequence over several
    devices, with the keys and values of all positions gathered, or sent around a ring (Grattafiori et al. 2024, section
    3.3.2; Liu et al. 2023). ``context_8x4`` is data 8 × context 4; parameters are stored split over all devices.
    """
    r = roles(graph)
    if no_batch(graph, r, devices) is None:
        yield Skipped(
            name="context", reason="the batch divides among all devices, so no sequence has to be split"
        )
        return
    sequence = r.sizes(graph, r.sequence)
    if not sequence:
        yield Skipped(name="context", reason="the model has no sequence dim")
        return
    for degree in (t for t in range(2, devices + 1) if devices % t == 0):
        data = devices // degree
        names, outer = (("data",), (data,)) if data > 1 else ((), ())
        mesh = Mesh(names=(*names, "context"), sizes=(*outer, degree))
        why = no_batch(graph, r, data)
        if why is None and not any(s % degree == 0 for s in sequence):
            why = f"no sequence dim ({', '.join(map(str, sequence))}) divides by {degree}"
        if why is None and not fits(mesh, machine):
            why = (
                f"groups of {degree} devices are neither whole nodes of {machine.name} nor equal parts of one"
            )
        if why:
            yield Skipped(name=f"context_{data}x{degree}", reason=why)
        else:
            axes = tuple(range(len(mesh.sizes)))
            yield Intent(name=f"context_{data}x{degree}", mesh=mesh, allow=_positions(r), stored=axes)


def _positions(r: Roles) -> Allow:
    """The batch over all axes but the last, positions over the last one, and parameters stored split over all."""

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        axes = list(range(len(mesh.sizes)))
        if node.kind == "parameter":
            return stored_apart(r, node, cfg, axes)
        ok = by_batch(r, node, cfg, mesh, axes[:-1])
        ring = [i for i, d in enumerate(node.space) if d.kind == "ring"]
        split = only(cfg, axes[-1:], [*r.dims(node, r.sequence), *ring])
        return ok & (split if split.any() else only(cfg, axes[-1:], free(node)))

    return allow


def _downstream(graph: Graph, start: set[str]) -> set[str]:
    """Nodes that depend on these nodes, directly or indirectly."""
    seen = set(start)
    for n in graph.nodes:  # in execution order, except for loop carries
        if any(a.tensor in graph.producer and graph.producer[a.tensor].name in seen for _, a in n.reads):
            seen.add(n.name)
    return seen
