"""The least memory that variants of a step need, and the error that reports it if none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.errors import Infeasible
from pase.machine import Mesh

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["Footprint", "least_memory", "needs_on_more", "nothing_fits"]


class Footprint(NamedTuple):
    """The least memory that a variant needs: bytes on a device, on the mesh on which it needs the least."""

    nbytes: float
    mesh: Mesh
    variant: Variant


def least_memory(problem: SplitProblem, mesh: Mesh) -> float:
    """Return a lower bound on the bytes per device that any strategy on this mesh needs, without bytes in flight."""
    spaces = problem.pricing.configs(mesh)
    p = problem.account.profile(problem.graph, mesh, spaces, float("inf"), problem.optimizer)
    lowest = {id(b): b.min() for b in p.bytes}
    least = np.array([lowest[id(b)] for b in p.bytes])
    least[p.stop <= p.start] = 0.0
    change = np.zeros(int(p.stop.max()) + 1)
    np.add.at(change, p.start, least)
    np.add.at(change, p.stop, -least)
    return float(np.cumsum(change)[:-1].max())


def needs_on_more(
    problem: SplitProblem, traced: Traced, least: Sequence[Footprint], limit: float
) -> Iterator[tuple[int, float]]:
    """Yield (devices, least bytes) of the smallest variant on 2, 4, … 64 times the devices, until it fits."""
    p = problem.varied(traced, min(least, key=lambda n: n.nbytes).variant)
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(p, devices=factor * p.devices, graph=replace(p.graph, fixed={}))
        needs = min((least_memory(more, m) for m in more.meshes(None, 2)), default=float("inf"))
        yield more.devices, needs
        if needs <= limit:
            return


def nothing_fits(
    least: Sequence[Footprint], limit: float, devices: int, more: Sequence[tuple[int, float]]
) -> Infeasible:
    """Return the error that says what would fit.

    more: (devices, least bytes) of the smallest variant on more devices.
    """
    nbytes, mesh, variant = min(least, key=lambda n: n.nbytes)
    enough = next((n for n, b in more if b <= limit), None)
    if enough is not None:
        fix = f"use {enough} devices, on which it may fit, or a smaller batch"
    elif more:
        fix = f"use a smaller batch or model; even {more[-1][0]} devices do not suffice"
    else:
        fix = "use more devices or a smaller batch"
    shape = "×".join(map(str, mesh.sizes))
    return Infeasible(
        f"no strategy found that fits {limit / 2**30:.4g} GiB per device on {devices} devices: each needs at least "
        f"{nbytes / 2**30:.4g} GiB ({variant}, mesh {shape})",
        fix=fix,
    )
