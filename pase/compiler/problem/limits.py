"""The part of the search space that a target can express: its meshes, and the configs of each node on them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pase.baselines.flow import Roles, roles
from pase.baselines.masks import by_batch, fits, free, most, no_batch, only, state_apart, stored_apart
from pase.errors import Infeasible
from pase.ir import Graph, Node
from pase.machine import Machine, Mesh
from pase.plan.targets import TargetAxis, TargetForm
from pase.tables.layouts import NOT_SPLIT, access_rules, state_index

__all__ = ["FormLimit", "form_meshes", "without_single"]


def form_meshes(form: TargetForm, graph: Graph, devices: int, machine: Machine) -> list[Mesh]:
    """Return the meshes of a form with axes on which the model can be split. Axes of one device are kept.

    Raises Infeasible, with a reason for each mesh, if there are none.
    """
    why: dict[str, None] = {}
    out = []
    for sizes in _factors(devices, len(form.axes)):
        if any(n < a.at_least for n, a in zip(sizes, form.axes, strict=True)):
            continue
        mesh = Mesh(names=tuple(a.name for a in form.axes), sizes=sizes)
        reason = _why_not(form, roles(graph), graph, machine, mesh)
        if reason is None:
            out.append(mesh)
        else:
            why[reason] = None
    if not out:
        some = list(why)[:_MOST_REASONS] or [f"it needs more than {devices} devices"]
        raise Infeasible("; ".join(some), where=f"'{graph.name}' on {devices} devices")
    return out


_MOST_REASONS = 3


def _factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as an ordered product.

    >>> list(_factors(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        yield (n,)
        return
    for first in (d for d in range(1, n + 1) if n % d == 0):
        yield from ((first, *rest) for rest in _factors(n // first, parts - 1))


def _why_not(form: TargetForm, r: Roles, graph: Graph, machine: Machine, mesh: Mesh) -> str | None:
    ways = dict(zip(form.axes, mesh.sizes, strict=True))
    if not fits(mesh, machine):
        shape = "×".join(map(str, mesh.sizes))
        return f"a mesh {shape} divides the nodes of {machine.name} into unequal parts"
    if why := no_batch(graph, r, math.prod(n for a, n in ways.items() if a.splits_batch)):
        return why
    for a, n in ways.items():
        if a.splits_batch or n == 1:
            continue
        inside = r.sizes(graph, r.tensor - r.ends)
        if not inside:
            return "no dim of it can be split by tensor parallelism"
        if uneven := [s for s in inside if s % n]:
            return f"{n} devices do not divide {', '.join(map(str, uneven))} (heads or hidden units)"
        sequence = r.sizes(graph, r.sequence)
        if a.use == "tensor_sequence" and not any(s % n == 0 for s in sequence):
            return f"{n} devices divide none of its numbers of positions ({sequence})"
    return None


def without_single(mesh: Mesh) -> tuple[Mesh, list[int]]:
    """Return the mesh without axes of one device, and the indices of the axes that are left.

    >>> without_single(Mesh(names=("replicate", "shard"), sizes=(1, 8)))
    (Mesh(names=('shard',), sizes=(8,)), [1])
    """
    kept = [i for i, n in enumerate(mesh.sizes) if n > 1] or [0]
    return Mesh(names=tuple(mesh.names[i] for i in kept), sizes=tuple(mesh.sizes[i] for i in kept)), kept


@dataclass(frozen=True, kw_only=True, eq=False)
class FormLimit:
    """The configs of a graph's nodes that a form of a target can express (``pase.tables.build.ConfigLimit``)."""

    form: TargetForm
    graph: Graph

    @cached_property
    def _roles(self) -> Roles:
        return roles(self.graph)

    @cached_property
    def _readers(self) -> frozenset[str]:
        """The nodes that read weights."""
        return frozenset(w.node for w in self._roles.weights)

    @cached_property
    def _weights(self) -> frozenset[str]:
        """The parameters that products and look-ups read."""
        return frozenset(w.parameter for w in self._roles.weights)

    def alike(self, node: Node) -> Hashable:
        """Nodes with equal dims for which this is equal may have the same configs."""
        rules = tuple(access_rules(node)) if self.form.one_axis_a_dim else ()
        if not self.form.axes:
            return rules
        r = self._roles
        reads, weight = node.name in self._readers, node.name in self._weights
        return rules, r.alike[node.name], tuple(r.dims(node, r.model)), reads, weight

    def allowed(self, node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        """bool [K]: whether each config can be expressed. cfg: int8 [K, axes]."""
        ok = np.ones(len(cfg), dtype=bool)
        if self.form.one_axis_a_dim:
            for rule in access_rules(node):
                ok &= rule.by_one_axis(cfg, mesh)
        if self.form.state_as_stored and (state := state_index(node)):
            ok &= ~np.isin(cfg, state).any(axis=1)
        if not self.form.axes:
            return ok
        single = [i for i, n in enumerate(mesh.sizes) if n == 1]
        ok &= only(cfg, single, [NOT_SPLIT])
        at = {name: i for i, name in enumerate(mesh.names) if mesh.sizes[i] > 1}
        used = [(a, at[a.name]) for a in self.form.axes if a.name in at]
        batch = [i for a, i in used if a.splits_batch]
        tensor = [(a, i) for a, i in used if not a.splits_batch]
        if node.kind == "parameter":
            return self._parameter(node, cfg, mesh, used, ok)
        ok &= by_batch(self._roles, node, cfg, mesh, batch)
        for a, i in tensor:
            ok = self._tensor(node, cfg, mesh, a, i, ok)
        return ok

    def _parameter(
        self, node: Node, cfg: np.ndarray, mesh: Mesh, used: Sequence[tuple[TargetAxis, int]], ok: np.ndarray
    ) -> np.ndarray:
        r = self._roles
        split = [*r.dims(node, r.tensor), *r.dims(node, r.experts)]
        model = [i for a, i in used if not a.splits_batch]
        ok = ok & only(cfg, model, [*split, NOT_SPLIT])
        ok &= only(cfg, [i for a, i in used if a.use == "replicate"], [NOT_SPLIT])
        for a, i in used:
            if a.use == "shard" and a.weights_alone and node.name not in self._weights:
                ok &= only(cfg, [i], [NOT_SPLIT])
            elif a.use == "shard" and a.model_dim:
                ok &= _not_whole(only(cfg, [i], [*r.dims(node, r.model), NOT_SPLIT]), cfg, i)
            elif a.use == "shard":
                taken = split if model else ()
                ok &= _not_whole(stored_apart(r, node, cfg, [i], taken), cfg, i)
            elif a.use == "shard_state":
                ok &= _not_whole(state_apart(node, cfg, [i]), cfg, i)
        return most(cfg, ok, split, mesh) if model and split else ok

    def _tensor(
        self, node: Node, cfg: np.ndarray, mesh: Mesh, a: TargetAxis, axis: int, ok: np.ndarray
    ) -> np.ndarray:
        r = self._roles
        if a.whole_logits and r.dims(node, r.ends) and node.kind != "copy" and node.name not in self._readers:
            return ok & only(cfg, [axis], free(node))
        split, inside = r.dims(node, r.tensor), r.dims(node, r.tensor - r.ends)
        sequence = r.dims(node, r.sequence) if a.use == "tensor_sequence" and not inside else []
        ok = ok & only(cfg, [axis], [*split, *r.dims(node, r.experts), *sequence, *free(node)])
        if node.kind == "copy":
            return ok
        if split:
            return most(cfg, ok, [*split, *r.dims(node, r.experts)], mesh)
        if sequence and node.kind in ("elementwise", "reduce", "carry"):
            return most(cfg, ok, sequence, mesh)
        return ok


def _not_whole(allowed: np.ndarray, cfg: np.ndarray, axis: int) -> np.ndarray:
    """Of the allowed configs, those that split something over the axis, if there are any.

    Baselines may keep small parameters whole, but these programs split all of them.
    """
    split = allowed & (cfg[:, axis] != NOT_SPLIT)
    return split if split.any() else allowed
