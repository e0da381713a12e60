"""Tensor parallelism combined with data parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from pase.baselines.flow import Roles, roles
from pase.baselines.masks import by_batch, fits, free, most, no_batch, only, state_apart, stored_apart
from pase.baselines.rules import rule
from pase.baselines.types import Allow, Intent, Skipped
from pase.ir import Graph, Node
from pase.machine import Machine, Mesh
from pase.tables.layouts import NOT_SPLIT

__all__ = ["megatron"]

Apart = Literal["nothing", "state", "parameters"]


@rule("megatron", rank=6)
def megatron(graph: Graph, devices: int, machine: Machine) -> Iterator[Intent | Skipped]:
    """Tensor parallelism within data parallelism (Shoeybi et al. 2019), for each degree, with and without
    sequence parallelism (Korthikanti et al. 2022). ``megatron_8x4`` is data 8 × model 4. ``megatron_sp_fsdp``
    also stores parameters split over the data axis, as Llama 3 was trained (Grattafiori et al. 2024, section 3.3).
    ``megatron_sp_zero2`` splits only gradients and optimizer state (Megatron-LM's distributed optimizer).

    Heads, hidden units and vocabulary are split over the model axes. If there are fewer heads (or key-value heads)
    than model devices, they are split as far as possible, on a mesh with two model axes, and replicated beyond that.
    """
    r = roles(graph)
    if not r.model or not r.tensor:
        yield Skipped(name="megatron", reason="no dim runs through most weights, as a model dim would")
        return
    for degree in (t for t in range(2, devices + 1) if devices % t == 0):
        data = devices // degree
        label = f"{data}x{degree}"
        why = no_batch(graph, r, data)
        if why:
            yield Skipped(name=f"megatron_{label}", reason=why)
            continue
        sizes, inside = r.sizes(graph, r.tensor), r.sizes(graph, r.tensor - r.ends)
        if not any(size % degree == 0 for size in sizes):
            yield Skipped(
                name=f"megatron_{label}",
                reason=f"none of the heads, hidden units and vocabularies ({sizes}) is divisible by {degree}",
            )
            continue
        meshes = [m for m in _model_meshes(data, degree, inside) if fits(m, machine)]
        if not meshes:
            yield Skipped(
                name=f"megatron_{label}",
                reason=f"groups of {degree} devices are neither whole nodes of {machine.name} nor equal parts of one",
            )
            continue
        uneven = ", ".join(str(s) for s in sizes if s % degree)
        notes = (
            *(
                (f"{degree} does not divide {uneven}, so these dims are split less or not at all",)
                * bool(uneven)
            ),
            *((_merged_note(graph, r),) * bool(r.merged)),
        )
        sequence = r.sizes(graph, r.sequence)
        variants: dict[str, tuple[bool, Apart]] = {"megatron": (False, "nothing")}
        if any(s % degree == 0 for s in sequence):
            variants["megatron_sp"] = (True, "nothing")
            if data > 1:
                variants["megatron_sp_zero2"] = (True, "state")
                variants["megatron_sp_fsdp"] = (True, "parameters")
        else:
            yield Skipped(
                name=f"megatron_sp_{label}", reason=f"no sequence dim ({sequence}) divides by {degree}"
            )
        for mesh in meshes:
            for name, (by_sequence, apart) in variants.items():
                allow = _tensor_parallel(r, data, by_sequence=by_sequence, apart=apart)
                yield Intent(name=f"{name}_{label}", mesh=mesh, allow=allow, alike=r.alike, notes=notes)


def _merged_note(graph: Graph, r: Roles) -> str:
    """What a baseline does not do with merged products, because a parameter is stored as the model has it."""
    sizes = ", ".join(map(str, r.sizes(graph, r.merged)))
    return (
        f"the {sizes} columns of products that are cut into parts (queries, keys and values; gate and up) are stored "
        "in the model's order, so each device computes all of them or sends what it computes; Megatron stores the "
        "columns of a device together, as pase price --as tp=N has it"
    )


def _model_meshes(data: int, degree: int, sizes: Sequence[int]) -> Iterator[Mesh]:
    """Meshes with one model axis, or with two if only a factor of the degree divides a dim."""
    names, outer = (("data",), (data,)) if data > 1 else ((), ())
    yield Mesh(names=(*names, "model"), sizes=(*outer, degree))
    parts = {math.gcd(s, degree) for s in sizes} - {1, degree}
    for part in sorted({*parts, *(degree // p for p in parts)}):
        yield Mesh(names=(*names, "model", "model2"), sizes=(*outer, part, degree // part))


def _tensor_parallel(r: Roles, data: int, *, by_sequence: bool, apart: Apart) -> Allow:
    """apart: what is also split over the data axis."""
    batch_axes = [0] if data > 1 else []

    def parameter(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        model = range(len(batch_axes), len(mesh.sizes))
        tensor, experts = r.dims(node, r.tensor), r.dims(node, r.experts)
        allowed = only(cfg, model, [*tensor, *experts, *r.dims(node, r.merged), NOT_SPLIT])
        if apart == "parameters":
            allowed &= stored_apart(r, node, cfg, batch_axes, taken=[*tensor, *experts])
        elif apart == "state":
            allowed &= state_apart(node, cfg, batch_axes)
        else:
            allowed &= only(cfg, batch_axes, [NOT_SPLIT])
        return most(cfg, allowed, [*tensor, *experts], mesh) if tensor else allowed

    def allow(node: Node, cfg: np.ndarray, mesh: Mesh) -> np.ndarray:
        if node.kind == "parameter":
            return parameter(node, cfg, mesh)
        model = range(len(batch_axes), len(mesh.sizes))
        tensor, experts = r.dims(node, r.tensor), r.dims(node, r.experts)
        inside = r.dims(node, r.tensor - r.ends)
        sequence = r.dims(node, r.sequence) if by_sequence and not inside else []
        allowed = by_batch(r, node, cfg, mesh, batch_axes)
        allowed &= only(cfg, model, [*tensor, *experts, *r.dims(node, r.merged), *sequence, *free(node)])
        if node.kind == "copy":
            return allowed
        if tensor:
            return most(cfg, allowed, [*tensor, *experts], mesh)
        if sequence and node.kind in ("elementwise", "reduce", "carry"):
            return most(cfg, allowed, sequence, mesh)
        return allowed

    return allow
