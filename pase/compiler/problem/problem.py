"""The problem to solve: a graph to split over the devices of a machine, under a cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pase.compiler.problem.variants import Candidate, Variant
from pase.errors import Infeasible, PaseError
from pase.frontends.registry import NotInParts
from pase.ir import FixedLayout, Remark
from pase.ir.fixed import to_free
from pase.tables.fixed import misfit, why_not

if TYPE_CHECKING:
    from pase.compiler.problem.pricing import Summed
    from pase.frontends.registry import Traced
    from pase.ir import Graph
    from pase.machine import CostModel, Machine, Mesh
    from pase.memory.accounts import Account
    from pase.plan.targets import TargetForm
    from pase.tables import CostTables
    from pase.tables.build import Space

__all__ = ["Progress", "SplitProblem"]

Progress = Callable[[str], None]

_MOST_PRIME_AXES = 4
"""The mesh of prime factors is also searched if it has at most this many axes."""


def _limited(graph: Graph, fixed: Mapping[str, FixedLayout]) -> Graph:
    """Return the graph limited to the layouts that the user fixed."""
    if not fixed:
        return graph
    paths = [f"'{layout.path}'" for layout in fixed.values() if not layout.constraint]
    if not paths:  # what constraints cost is said for each of them
        return replace(graph, fixed=fixed)
    some = ", ".join(paths[:_MOST_NAMED]) + (
        f" and {more} more" if (more := len(paths) - _MOST_NAMED) > 0 else ""
    )
    mesh = next(iter(fixed.values())).mesh
    what = f"{some} {'keeps its layout' if len(paths) == 1 else 'keep their layouts'} on your mesh, {mesh}"
    remarks = (*graph.remarks, Remark("assumed", f"{what}; the search decides the rest"))
    return replace(graph, fixed=fixed, remarks=remarks)


_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """A graph to split over the devices of a machine, under a cost model.

    overlap: as in ``CompileOptions``. form: the form that strategies must have; None for any strategy.
    """

    graph: Graph
    devices: int
    machine: Machine
    model: CostModel
    optimizer: str
    variant: Variant
    overlap: str = "none"
    form: TargetForm | None = None

    @classmethod
    def of(
        cls,
        raw: Graph,
        devices: int,
        machine: str | Path | Machine | None,
        cost_model: str,
        optimizer: str,
        overlap: str = "none",
        form: TargetForm | None = None,
        fixed: Mapping[str, FixedLayout] | None = None,
    ) -> SplitProblem:
        """Return the problem of a traced graph as written. overlap: may also be "machine". fixed: ``Graph.fixed``.

        Raises PaseError if it has sizes that are not bound, or if no strategy keeps the fixed layouts.
        """
        from pase import costmodels
        from pase.ir import named, simplify
        from pase.ir.whole_step import whole_step
        from pase.machine import DEFAULT, Machine
        from pase.machine import load as load_machine
        from pase.memory.live import is_trained

        if raw.symbols:
            raise PaseError(
                f"it has symbolic sizes {', '.join(raw.symbols)}, which must be bound for the search",
                where=f"model '{raw.name}'",
                fix=f"bind them with dims={{'{raw.symbols[0]}': 64}}, or --dim {raw.symbols[0]}=64",
            )
        m = (
            machine
            if isinstance(machine, Machine)
            else load_machine(machine if machine is not None else DEFAULT)
        )
        m = m.for_calls() if raw.facts.eager else m
        graph, priced = _limited(named(simplify(raw)), fixed or {}), costmodels.get(cost_model, m)
        _check_fixed(graph, devices)
        if overlap == "machine":
            gradients = is_trained(graph) or bool(whole_step(graph))
            overlap = "parameters" if m.overlaps and priced.unit == "s" and gradients else "none"
        return cls(
            graph=graph,
            devices=devices,
            machine=m,
            model=priced,
            optimizer=optimizer,
            variant=Variant(),
            overlap=overlap,
            form=form,
        )

    def varied(self, traced: Traced, variant: Variant) -> SplitProblem:
        """Return the same problem for another way to run the step of this model. See ``on``."""
        return self.on(Candidate(traced=traced, variant=variant))

    def on(self, candidate: Candidate) -> SplitProblem:
        """Return the same problem for a candidate's way to run the step.

        Raises NotInParts if a micro-batch cannot be split in the layout that the user fixed for the batch.
        """
        variant, graph = candidate.variant, _limited(candidate.graph, self.graph.fixed)
        own = _own_mesh(graph)
        if own is not None and (why := why_not(graph, own)) is not None:
            raise NotInParts(f"in {variant.accumulate} micro-batches, {why}")
        return replace(self, graph=graph, variant=variant)

    def meshes(self, mesh: str | None, max_axes: int, *, distinct: bool = True) -> list[Mesh]:
        """Return the meshes to search: the given one, or all with at most the allowed number of axes.

        distinct: whether to drop meshes that differ from another only in the order of axes over equal links.

        If the problem has a form with axes, these are its meshes, with any number of axes.

        If the user fixed layouts, these are the mesh of those layouts, and the meshes that divide its axes further.

        Raises PaseError if the given mesh cannot hold the fixed layouts or is none of the form's, and Infeasible if
        there are none.
        """
        from pase.machine import mesh_from, meshes

        own = _own_mesh(self.graph)
        if self.form is not None and self.form.axes:
            return self._meshes_of(self.form, mesh)
        if mesh is not None:
            asked = mesh_from(mesh, self.devices)
            if own is not None and (why := why_not(self.graph, asked)) is not None:
                raise PaseError(why, where="mesh", fix=f"leave out mesh, or give it as {_text(own)}")
            return [asked if own is None or "=" in mesh else _named_after(self.graph, asked)]
        if own is None or own.devices != self.devices:
            return meshes(
                self.devices, self.machine, max_axes, max_prime_axes=_MOST_PRIME_AXES, distinct=distinct
            )
        every = meshes(self.devices, self.machine, max_axes, max_prime_axes=_MOST_PRIME_AXES, distinct=False)
        finer = [m for m in every if m.sizes != own.sizes and why_not(self.graph, m) is None]
        return [own, *(_named_after(self.graph, m) for m in finer)]

    def _meshes_of(self, form: TargetForm, asked: str | None) -> list[Mesh]:
        """Return the meshes of a form with axes, or the one that the user asks for."""
        from pase.compiler.problem.limits import form_meshes, without_single
        from pase.machine import mesh_from

        every = form_meshes(form, self.graph, self.devices, self.machine)
        if asked is not None:
            wanted, _ = without_single(mesh_from(asked, self.devices))
            shaped = [m for m in every if without_single(m)[0].sizes == wanted.sizes]
            every = [m for m in shaped if "=" not in asked or without_single(m)[0].names == wanted.names]
            if not every:
                axes = ", ".join(a.name for a in form.axes)
                raise Infeasible(
                    f"the target has no mesh {asked} for this model: its axes are {axes}, in this order",
                    where="mesh",
                    fix="leave out mesh, or give sizes by these names",
                )
        kept = [m for m in every if why_not(self.graph, m) is None]
        if not kept and (found := misfit(self.graph, every[0])) is not None:
            layout, why = found
            raise Infeasible(why, where="target", fix=to_free([layout]))
        return kept

    @cached_property
    def pricing(self) -> Summed:
        """How seconds add up, with the tables built for it so far."""
        from pase.compiler.problem.pricing import PRICINGS

        limit = None
        if self.form is not None:
            from pase.compiler.problem.limits import FormLimit

            limit = FormLimit(form=self.form, graph=self.graph)
        return PRICINGS[self.overlap](self.graph, self.model, self.optimizer, limit)

    @property
    def account(self) -> Account:
        """How memory is counted."""
        from pase.memory.accounts import account_for

        return account_for(self.machine, self.graph, self.pricing.occupied is not None)

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        """Return the additive cost tables of a mesh; they are built once."""
        return self.pricing.tables(mesh)


def _own_mesh(graph: Graph) -> Mesh | None:
    """Return the mesh of the user's arrays, if their layouts are fixed."""
    from pase.machine import Mesh

    own = next((layout.mesh for layout in graph.fixed.values()), None)
    return None if own is None else Mesh(names=own.names, sizes=own.sizes)


def _named_after(graph: Graph, mesh: Mesh) -> Mesh:
    """Return a mesh that divides the axes of the user's mesh, with their names: data, or data_0 and data_1."""
    own = next(iter(graph.fixed.values())).mesh
    parts = own.parts(mesh.sizes) or {}
    names = [
        f"{name}_{i}" if len(axes) > 1 else name for name, axes in parts.items() for i in range(len(axes))
    ]
    return replace(mesh, names=tuple(names)) if len(set(names)) == len(mesh.sizes) else mesh


def _text(mesh: Mesh) -> str:
    return repr(",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True)))


def _check_fixed(graph: Graph, devices: int) -> None:
    """Raise PaseError if no strategy keeps the layouts that the user fixed."""
    first, own = next(iter(graph.fixed.values()), None), _own_mesh(graph)
    if first is None or own is None:
        return
    if own.devices != devices:
        raise PaseError(
            f"it lies on the mesh {first.mesh} of {own.devices} devices, but the plan is for {devices}",
            where=f"'{first.path}'",
            fix=f"give devices={own.devices}, or {to_free(graph.fixed.values())}",
        )
    if (found := misfit(graph, own)) is not None:
        layout, why = found
        raise PaseError(why, fix=f"change its layout, or {to_free([layout])}")
