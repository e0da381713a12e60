"""A graph to split over the devices of a machine, and what a search of it found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pase.compiler.variants import Variant, graph_of
from pase.errors import Infeasible, PaseError
from pase.ir.garbage import uncollected

if TYPE_CHECKING:
    import numpy as np

    from pase.baselines import Baseline, Skipped
    from pase.compiler.overlap import Hiding
    from pase.frontends.registry import Traced
    from pase.ir import Graph, Node
    from pase.machine import CostModel, Machine, Mesh
    from pase.memory.account import Memory
    from pase.plan.types import PlanData
    from pase.search import MemoryProfile, Solution
    from pase.tables import CostTables
    from pase.tables.build import Space

__all__ = ["Found", "Problem", "Progress"]

Progress = Callable[[str], None]

_MOST_PRIME_AXES = 4
"""The mesh of prime factors is searched too where it has at most this many axes."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best strategy over the meshes that were searched. bounds: what is proven of each, by its axes' sizes."""

    mesh: Mesh
    space: Space
    solution: Solution
    tried: tuple[tuple[Mesh, float], ...]
    bounds: Mapping[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def configs(self) -> dict[str, np.ndarray]:
        chosen = zip(self.space.graph.nodes, self.space.configs, self.solution.choice, strict=True)
        return {n.name: configs[i] for n, configs, i in chosen}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph to split over the devices of a machine, under a cost model."""

    graph: Graph
    devices: int
    machine: Machine
    model: CostModel
    optimizer: str
    variant: Variant
    overlap: str = "none"
    _hiding: dict[tuple[int, ...], Hiding] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[tuple[int, ...], tuple[CostTables, Space]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(
        cls, raw: Graph, devices: int, machine: str | Path | Machine | None, cost_model: str, optimizer: str
    ) -> Problem:
        from pase import costmodels
        from pase.ir import named, simplify
        from pase.machine import DEFAULT, Machine
        from pase.machine import load as load_machine

        if raw.symbols:
            raise PaseError(
                f"model '{raw.name}' has symbolic sizes {', '.join(raw.symbols)}: bind them "
                f"to search: dims={{'{raw.symbols[0]}': 64}}, or --dim {raw.symbols[0]}=64"
            )
        m = (
            machine
            if isinstance(machine, Machine)
            else load_machine(machine if machine is not None else DEFAULT)
        )
        return cls(
            graph=named(simplify(raw)),
            devices=devices,
            machine=m,
            model=costmodels.get(cost_model, m),
            optimizer=optimizer,
            variant=Variant(),
        )

    def varied(self, traced: Traced, variant: Variant) -> Problem:
        """The same problem for another way to run the step."""
        return replace(self, graph=graph_of(traced, variant), variant=variant)

    def meshes(self, mesh: str | None, max_axes: int) -> list[Mesh]:
        from pase.machine import mesh_from, meshes

        if mesh is not None:
            return [mesh_from(mesh, self.devices)]
        return meshes(self.devices, self.machine, max_axes, max_prime_axes=_MOST_PRIME_AXES)

    def tables(self, mesh: Mesh) -> tuple[CostTables, Space]:
        """Cost tables of a mesh, built once: they depend on the sizes of its axes, not on their names."""
        from pase.tables.build import build

        if mesh.sizes not in self._tables:
            self._tables[mesh.sizes] = build(self.graph, mesh, self.model, self.optimizer)
        return self._tables[mesh.sizes]

    @uncollected()
    def search(
        self, over: Sequence[Mesh], say: Progress, seconds: dict[str, float], so_far: Found | None = None
    ) -> Found:
        """The best strategy over these meshes (and over those that ``so_far`` is the best of)."""
        from pase.compiler.overlap import solve_hiding
        from pase.search import solve

        best = so_far
        low = so_far.solution.bound if so_far else float("inf")
        tried = list(so_far.tried) if so_far else []
        bounds = dict(so_far.bounds) if so_far else {}
        spent = {"tables": seconds.get("tables", 0.0), "search": seconds.get("search", 0.0)}
        for i, mesh in enumerate(over):
            say(f"mesh {'×'.join(map(str, mesh.sizes))} ({i + 1} of {len(over)})")
            t0 = time.perf_counter()
            if self.overlap == "none":
                tables, space = self.tables(mesh)
                t1 = time.perf_counter()
                solution = solve(tables)
            else:
                space = self.hiding(mesh).space
                t1 = time.perf_counter()
                solution = solve_hiding(self.hiding(mesh))
            spent["tables"] += t1 - t0
            spent["search"] += time.perf_counter() - t1
            low = min(low, solution.bound)
            tried.append((mesh, solution.cost))
            bounds[mesh.sizes] = solution.bound
            if best is None or solution.cost < best.solution.cost:
                best = Found(mesh=mesh, space=space, solution=solution, tried=())
        if best is None:
            raise Infeasible(f"no mesh of {self.devices} devices fits machine {self.machine.name}")
        seconds |= spent
        s = best.solution  # where a gap is left, another mesh's bound may be the lowest
        s = replace(s, bound=min(s.bound, low), optimal=s.optimal and low >= s.cost * (1 - 1e-9))
        return replace(best, solution=s, tried=tuple(tried), bounds=bounds)

    def memory(self, found: Found) -> Memory:
        """What the answer needs on a device."""
        return self.memory_of(found.configs, found.mesh)

    def memory_of(self, configs: Mapping[str, np.ndarray], mesh: Mesh) -> Memory:
        """What a strategy needs on a device: node name -> int8 [axes]."""
        from pase.memory.course import needs
        from pase.plan.itemize import collectives

        moved = collectives(self.graph, mesh, configs, self.model)
        return needs(self.graph, mesh, configs, moved, self.optimizer, self.machine)

    def profile(self, mesh: Mesh, spaces: Sequence[np.ndarray], limit_bytes: float) -> MemoryProfile:
        """The limit as the search takes it, by the account that holds for the machine; buffers left out."""
        from pase.memory import account, course

        if self.machine.fuses_products:
            tile = self.machine.device.memory_tile
            return course.profile(self.graph, mesh, spaces, limit_bytes, self.optimizer, tile)
        return account.profile(self.graph, mesh, spaces, limit_bytes, self.optimizer)

    def least_memory(self, mesh: Mesh) -> float:
        """A lower bound on what any strategy on this mesh needs, buffers left out."""
        from pase.tables.layouts import configs

        p = self.profile(mesh, [configs(n, mesh) for n in self.graph.nodes], float("inf"))
        live = [(b.min(), lo, hi) for b, lo, hi in zip(p.bytes, p.start, p.stop, strict=True) if hi > lo]
        return float(max(sum(b for b, lo, hi in live if lo <= t < hi) for t in range(int(p.stop.max()))))

    @uncollected()
    def baselines(self) -> tuple[list[Baseline], list[Skipped]]:
        """What people do by hand, on this graph, and what does not apply to it."""
        from pase.baselines import Baseline, baselines
        from pase.compiler.overlap import exposed

        made = baselines(self.graph, self.devices, self.machine, self.model, tables_of=self.tables)
        given = [b for b in made if isinstance(b, Baseline)]
        if self.overlap != "none":
            given = [replace(b, cost=exposed(self.hiding(b.mesh), dict(b.strategy))) for b in given]
        return given, [b for b in made if not isinstance(b, Baseline)]

    def hiding(self, mesh: Mesh) -> Hiding:
        """Tables in which gradients hide behind backward, built once per mesh."""
        from pase.compiler.overlap import hiding

        if mesh.sizes not in self._hiding:
            self._hiding[mesh.sizes] = hiding(self.graph, mesh, self.model, self.optimizer)
        return self._hiding[mesh.sizes]

    def never_worse(
        self, found: Found, given: Sequence[Baseline], memory_limit: float | None = None
    ) -> Found:
        """The answer, or a method's own strategy that fits where that is cheaper: which only a gap under overlap can
        leave."""
        if self.overlap == "none":
            return found
        cheaper = sorted((b for b in given if b.cost < found.solution.cost), key=lambda b: b.cost)
        fitting = (
            b for b in cheaper
            if memory_limit is None or self.memory_of(b.strategy, b.mesh).total <= memory_limit
        )  # fmt: skip
        best = next(fitting, None)
        if best is None:
            return found
        h = self.hiding(best.mesh)
        solution = replace(
            found.solution, choice=h.space.index(best.strategy), cost=best.cost, optimal=False,
            bound=min(found.solution.bound, best.cost), method=f"the strategy of {best.name}",
        )  # fmt: skip
        return replace(found, mesh=best.mesh, space=h.space, solution=solution)

    def plan(
        self, found: Found, name: str, traced: Traced, seconds: Mapping[str, float],
        given: Sequence[Baseline] = (), skipped: Sequence[Skipped] = (),
    ) -> PlanData:  # fmt: skip
        """The plan of what the search found."""
        from pase.ir import digest
        from pase.plan.assemble import assemble, axes_by_use
        from pase.plan.types import Tried

        s = found.solution
        return assemble(
            self.graph, axes_by_use(self.graph, found.mesh, found.configs), found.configs, model=self.model,
            machine=self.machine, name=name, optimizer=self.optimizer, cost=s.cost, bound=s.bound, optimal=s.optimal,
            baselines={b.name: b.cost for b in given}, skipped={b.name: b.reason for b in skipped},
            tried=[Tried(mesh=m.sizes, cost=c) for m, c in found.tried], seconds=seconds,
            provenance=_provenance(self.graph, s.method, s.certificate), traced=traced,
            graph_digest=digest(traced.graph), accumulate=self.variant.accumulate, remat=self.variant.blocks,
        )  # fmt: skip

    def completed(self, pinned: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, np.ndarray]:
        """The cheapest strategy that gives these nodes these configs: node name -> int8 [axes]."""
        import numpy as np

        from pase.baselines import Intent, Skipped
        from pase.baselines.settle import settle

        def allow(node: Node, cfg: np.ndarray, _: Mesh) -> np.ndarray:
            alike = (cfg == pinned[node.name]).all(axis=1) if node.name in pinned else cfg[:, 0] == cfg[:, 0]
            return np.asarray(alike)

        found = settle(Intent(name="pinned", mesh=mesh, allow=allow), *self.tables(mesh))
        if isinstance(found, Skipped):
            raise Infeasible(found.reason)
        return dict(found.strategy)

    def plan_of(self, configs: Mapping[str, np.ndarray], mesh: Mesh, name: str, traced: Traced) -> PlanData:
        """The plan of a strategy that was not searched for (a baseline, a transferred one), priced alike."""
        from pase.compiler.overlap import exposed
        from pase.ir import digest
        from pase.plan.assemble import assemble
        from pase.plan.itemize import collectives, node_costs

        moved = collectives(self.graph, mesh, configs, self.model)
        cost = sum(
            c.total for c in node_costs(self.graph, mesh, configs, self.model, moved, self.optimizer).values()
        )
        if self.overlap != "none":
            cost = exposed(self.hiding(mesh), dict(configs))
        return assemble(
            self.graph, mesh, configs, model=self.model, machine=self.machine, name=name, optimizer=self.optimizer,
            cost=cost, bound=0.0, optimal=False, baselines={}, skipped={}, tried=[], seconds={},
            provenance=_provenance(self.graph, "given", "none"), traced=traced, graph_digest=digest(traced.graph),
            accumulate=self.variant.accumulate, remat=self.variant.blocks,
        )  # fmt: skip


def _provenance(graph: Graph, method: str, certificate: str) -> dict[str, str]:
    import pase

    versions = {"pase": pase.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {k: sys.modules[k].__version__ for k in ("jax", "numpy") if k in sys.modules}
    return {
        **versions,
        **graph.meta,
        "command": " ".join(sys.argv[:1] and [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "edges": str(len(graph.edges)),
        "search": method,
        "certificate": certificate,
    }
