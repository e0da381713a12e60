"""Layouts that the user requires of parameters and of the batch, and what each requirement costs."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.errors import Infeasible, PaseError, did_you_mean
from pase.frontends.blocks import BLOCKS
from pase.ir import FixedLayout, FixedMesh, Remark
from pase.plan.table import cost_text

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem.options import CompileOptions
    from pase.frontends.registry import Traced
    from pase.ir import Tensor

__all__ = ["BATCH", "fixed_of", "with_costs"]

BATCH = "batch"
"""The constraint that is for every array of the batch."""

DimAxes = tuple[tuple[str, ...] | None, ...]
"""Per tensor dim, the axes that split it; None if the search decides (``FixedLayout.dims``)."""


def fixed_of(traced: Traced, o: CompileOptions) -> Mapping[str, FixedLayout]:
    """Return tensor -> the layout that the user fixed: by the arrays' shardings, and by ``constraints``.

    Raises PaseError if a constraint matches nothing, does not fit what it matches, or names an axis that the mesh does
    not have.
    """
    if not o.constraints:
        return traced.fixed
    mesh, single = _mesh(traced, o)
    out = dict(traced.fixed)
    owner: dict[str, str] = {}
    for pattern, spec in o.constraints.items():
        matched = list(_matched(traced, pattern))
        if not matched:
            raise _unmatched(traced, pattern)
        for t in matched:
            dims = _dims(t, pattern, spec, mesh, single)
            layout = FixedLayout(path=t.path, mesh=mesh, dims=dims, constraint=pattern)
            if out.setdefault(t.name, layout) != layout:
                other = f"constraint '{owner[t.name]}'" if t.name in owner else "the array's own sharding"
                raise PaseError(
                    f"'{t.path}' is {layout} by this constraint, but {out[t.name]} by {other}",
                    where=f"constraint '{pattern}'",
                    fix="leave out one of them",
                )
            owner[t.name] = pattern
    return out if mesh.names else {}


def _mesh(traced: Traced, o: CompileOptions) -> tuple[FixedMesh, frozenset[str]]:
    """Return the mesh whose axes constraints name, and its axes of one device, which split nothing."""
    own = next((layout.mesh for layout in traced.fixed.values()), None)
    if own is not None:
        return own, frozenset()
    if o.mesh is None or "=" not in o.mesh:
        raise PaseError(
            "constraints name axes of a mesh, but the mesh's axes have no names",
            where="constraints",
            fix="give sizes with names: mesh='data=4,model=2' (--mesh data=4,model=2)",
        )
    from pase.machine import mesh_from

    asked = mesh_from(o.mesh, o.devices)
    ways = {name: size for name, size in asked.by_name.items() if size > 1}
    return FixedMesh(names=tuple(ways), sizes=tuple(ways.values())), frozenset({*asked.names} - {*ways})


def _matched(traced: Traced, pattern: str) -> Iterator[Tensor]:
    batch = _batch(traced) if pattern == BATCH else frozenset()
    for t in _stored(traced):
        if t.path in batch if pattern == BATCH else fnmatch.fnmatchcase(t.path, pattern):
            yield t


def _batch(traced: Traced) -> frozenset[str]:
    """The paths of the inputs that hold examples: not of state, keys or tables. Of a frontend that cannot tell, all
    inputs with dims."""
    ways = BLOCKS.get(traced.frontend)
    if ways is not None:
        return ways.batch_inputs(traced)
    return frozenset(t.path for t in traced.graph.inputs if t.shape)


def _stored(traced: Traced) -> tuple[Tensor, ...]:
    """The tensors whose layout may be required: parameters and the batch."""
    return (*traced.graph.parameters, *traced.graph.inputs)


def _unmatched(traced: Traced, pattern: str) -> PaseError:

    paths = [t.path for t in _stored(traced)]
    some = ", ".join(f"'{p}'" for p in paths[:5])
    return PaseError(
        f"no parameter and no array of the batch has such a name{did_you_mean(pattern, paths, cutoff=0.5)}",
        where=f"constraint '{pattern}'",
        fix=f"write a name, a pattern such as 'layers.*.weight', or 'batch'; there are {some}, …",
    )


def _dims(t: Tensor, pattern: str, spec: object, mesh: FixedMesh, single: frozenset[str]) -> DimAxes:
    """Return a constraint as one entry per dim. A single axis is for the first dim, with the others open."""
    where, rank = f"constraint '{pattern}'", len(t.shape)
    if isinstance(spec, str):
        entries: Sequence[object] = (spec, *[...] * (rank - 1)) if rank else ()
    else:
        try:
            entries = tuple(spec)  # type: ignore[arg-type]
        except TypeError:
            raise PaseError(f"{spec!r} is no layout", where=where, fix=_FORMS) from None
    if len(entries) > rank:
        raise PaseError(
            f"it has {len(entries)} entries, but '{t.path}' has {rank} dims", where=where, fix=_FORMS
        )
    out: list[tuple[str, ...] | None] = []
    for entry in (*entries, *[None] * (rank - len(entries))):
        if entry is ... or _unconstrained(entry):
            out.append(None)
            continue
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)  # type: ignore[arg-type]
        if unknown := [a for a in axes if a not in mesh.names and a not in single]:
            raise PaseError(f"the mesh {mesh} has no axis {unknown[0]!r}", where=where, fix=_FORMS)
        out.append(tuple(a for a in axes if a not in single))
    used = [a for axes in out for a in axes or ()]
    if len(set(used)) < len(used):
        raise PaseError("an axis splits two dims of one array", where=where, fix=_FORMS)
    return tuple(out)


_FORMS = (
    "write one entry for each dim: an axis of the mesh, a tuple of axes, None for a whole dim, or ... to leave it to "
    "the search; or one axis for the first dim alone"
)


def _unconstrained(entry: object) -> bool:
    """Whether it is JAX's PartitionSpec.UNCONSTRAINED, without loading JAX."""
    return type(entry).__name__ == "UnconstrainedSingleton"


def with_costs(c: Compiled, o: CompileOptions, compiled: Callable[[CompileOptions], Compiled]) -> Compiled:
    """Return the plan with a remark for each constraint that says what it costs.

    compiled: compiles the same model with other options.
    """
    constraints = dict(o.constraints or {})
    alone: list[str] = []
    for pattern in constraints if len(constraints) > 1 else ():
        fewer = {p: spec for p, spec in constraints.items() if p != pattern}
        alone.append(f"'{pattern}' {_cost(c, _without(fewer, o, compiled))}")
    every = _cost(c, _without({}, o, compiled))
    said = f"under your {len(constraints)} constraints, which together cost {every}"
    if len(constraints) == 1:
        said = f"under your constraint '{next(iter(constraints))}', which costs {every}"
    elif alone:
        said += "; left out one at a time: " + ", ".join(alone)
    stated = {p: str(spec) for p, spec in constraints.items()}
    plan = replace(
        c.plan,
        noted=(*c.plan.noted, Remark("assumed", said)),
        provenance={**c.plan.provenance, "constraints": json.dumps(stated)},
    )
    return replace(c, plan=plan)


def _without(
    constraints: Mapping[str, object], o: CompileOptions, compiled: Callable[[CompileOptions], Compiled]
) -> Compiled | None:
    """Return the plan under fewer constraints on the same mesh; None if nothing fits."""
    try:
        return compiled(replace(o, constraints=constraints or None, baselines=False))
    except Infeasible:
        return None


def _cost(c: Compiled, other: Compiled | None) -> str:
    """What the plan costs more than another one, in words."""
    if other is None or (other.plan.misfit is not None and c.plan.misfit is None):
        return "nothing, because without it nothing fits that was searched"
    if c.plan.misfit is not None and other.plan.misfit is None:
        return f"the memory limit, which {cost_text(other.plan.cost, other.plan.unit)} would meet without it"
    more = c.plan.cost / other.plan.cost - 1 if other.plan.cost else 0.0
    return (
        "nothing" if more < 0.0005 else f"{more:.1%} ({cost_text(other.plan.cost, other.plan.unit)} without)"
    )
