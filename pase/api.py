"""compile, load, compare: the way through, from a model to a Plan."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pase.errors import Infeasible, PaseError

if TYPE_CHECKING:
    import numpy as np

    from pase.frontends.from_jax import Traced
    from pase.ir import Graph
    from pase.machine import CostModel, Machine, Mesh
    from pase.plan.types import Plan
    from pase.search import Solution
    from pase.tables.build import Space

__all__ = ["compile", "load", "resolve"]

Progress = Callable[[str], None]


def compile(
    model: Any,
    params: Any = None,
    *batch: Any,
    devices: int,
    mesh: str | None = None,
    machine: str | Path | Machine | None = None,
    cost_model: str = "analytic",
    optimizer: str = "adam",
    unknown: Literal["error", "replicate"] = "error",
    max_axes: int = 3,
    progress: Progress | None = None,
) -> Plan:
    """Find the best split of every layer over ``devices``, over all meshes, and say what follows from it.

    model: "zoo:NAME?batch=…", "package.module:function" (which returns loss_fn, params, *batch), or a JAX
        callable ``loss_fn(params, *batch) -> scalar`` followed by its example arguments (shapes suffice).
    mesh: "4x8" or "data=4,model=8" fixes the mesh; else every mesh of at most ``max_axes`` axes is searched.
    machine: a name (``pase machines``), a TOML file, or a Machine.
    optimizer: whose state is counted and whose update is priced: see ``pase.tables.derive.OPTIMIZERS``.
    unknown: what to do at an op without a rule: "error", or "replicate" (it may not be split).

    Raises PaseError for bad input; Infeasible where no strategy exists.
    """
    from pase.tables.derive import OPTIMIZERS

    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise PaseError(f"devices must be a positive whole number, got {devices!r}")
    if optimizer not in OPTIMIZERS:
        raise PaseError(f"no optimizer '{optimizer}'; known: {', '.join(OPTIMIZERS)}")
    if unknown not in ("error", "replicate"):
        raise PaseError(f"unknown is 'error' or 'replicate', not {unknown!r}")
    say = progress or (lambda _: None)
    start = time.perf_counter()
    say("tracing the model")
    traced, name = _traced(model, params, batch, unknown)
    problem = Problem.of(traced.graph, devices, machine, cost_model, optimizer)
    seconds = {"trace": time.perf_counter() - start}
    found = problem.search(problem.meshes(mesh, max_axes), say, seconds)
    plan = problem.plan(found, name, traced, seconds, fixed=mesh is not None)
    plan.seconds["total"] = time.perf_counter() - start  # type: ignore[index]
    return plan


def load(path: str | Path) -> Plan:
    """Read a layout.json. PaseError where it is corrupt, cut off, or of another version."""
    from pase.plan.layout import load as load_layout

    return load_layout(path)


def _traced(model: Any, params: Any, batch: Sequence[Any], unknown: Any) -> tuple[Traced, str]:
    if isinstance(model, str):
        if params is not None or batch:
            raise PaseError(f"'{model}' names a model: give no further arguments with it")
        return resolve(model, unknown), model
    if not callable(model):
        raise PaseError(f"a model is a name or a callable, not {type(model).__name__}: see pase.compile's help")
    if params is None:
        raise PaseError("give the loss function's example arguments after it: pase.compile(loss_fn, params, batch, devices=…)")
    from pase.frontends.from_jax import trace

    traced = trace(model, params, *batch, unknown=unknown)
    return traced, traced.graph.name


def resolve(model: str, unknown: Literal["error", "replicate"] = "error") -> Traced:
    """Trace the model that this name means: zoo:NAME or package.module:function."""
    from pase.frontends.from_jax import trace

    if model.startswith("zoo:"):
        from pase import zoo

        m = zoo.get(model.removeprefix("zoo:"))
        return trace(m.loss_fn, m.params, m.batch, name=model, unknown=unknown)
    suffix = Path(model).suffix
    if suffix in (".onnx", ".pb") or Path(model).is_dir():
        raise PaseError(f"{model}: this version reads JAX models only; ONNX and TensorFlow frontends are not there yet")
    module, _, attribute = model.partition(":")
    if not attribute or not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise PaseError(f"'{model}' is not a model: write zoo:NAME (see 'pase zoo') or package.module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise PaseError(f"cannot import '{module}' for model '{model}': {e}") from e
    except AttributeError as e:
        raise PaseError(f"module '{module}' has no '{attribute}'") from e
    made = function()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise PaseError(f"{model}() must return (loss_fn, params, *batch), got {type(made).__name__}")
    return trace(made[0], made[1], *made[2:], name=model, unknown=unknown)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best strategy over the meshes that were searched."""

    mesh: Mesh
    space: Space
    solution: Solution
    tried: tuple[tuple[Mesh, float], ...]

    @property
    def configs(self) -> dict[str, np.ndarray]:
        return {
            n.name: self.space.configs[v][self.solution.choice[v]] for v, n in enumerate(self.space.graph.nodes)
        }


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph to split over the devices of a machine, under a cost model."""

    graph: Graph
    devices: int
    machine: Machine
    model: CostModel
    optimizer: str

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
                f"model '{raw.name}' has symbolic sizes {', '.join(raw.symbols)}: bind them to search, graph.bind(…)"
            )
        m = machine if isinstance(machine, Machine) else load_machine(machine if machine is not None else DEFAULT)
        return cls(
            graph=named(simplify(raw)), devices=devices, machine=m, model=costmodels.get(cost_model, m), optimizer=optimizer
        )

    def meshes(self, mesh: str | None, max_axes: int) -> list[Mesh]:
        from pase.machine import mesh_from, meshes

        if mesh is not None:
            return [mesh_from(mesh, self.devices)]
        return meshes(self.devices, self.machine, max_axes, max_prime_axes=4)

    def search(self, over: Sequence[Mesh], say: Progress, seconds: dict[str, float]) -> Found:
        from pase.search import solve
        from pase.tables.build import build

        best: Found | None = None
        tried: list[tuple[Mesh, float]] = []
        tables_s = search_s = 0.0
        for i, mesh in enumerate(over):
            say(f"mesh {'×'.join(map(str, mesh.sizes))} ({i + 1} of {len(over)})")
            t0 = time.perf_counter()
            tables, space = build(self.graph, mesh, self.model, self.optimizer)
            t1 = time.perf_counter()
            solution = solve(tables)
            t2 = time.perf_counter()
            tables_s, search_s = tables_s + t1 - t0, search_s + t2 - t1
            tried.append((mesh, solution.cost))
            if best is None or solution.cost < best.solution.cost:
                best = Found(mesh=mesh, space=space, solution=solution, tried=())
        if best is None:
            raise Infeasible(f"no mesh of {self.devices} devices fits machine {self.machine.name}")
        seconds["tables"], seconds["search"] = tables_s, search_s
        return Found(mesh=best.mesh, space=best.space, solution=best.solution, tried=tuple(tried))

    def plan(self, found: Found, name: str, traced: Traced, seconds: dict[str, float], *, fixed: bool) -> Plan:
        from pase.plan.assemble import assemble, raw_digest
        from pase.plan.types import Tried

        s = found.solution
        return assemble(
            self.graph, found.mesh, found.configs, model=self.model, machine=self.machine, name=name,
            optimizer=self.optimizer, cost=s.cost, bound=s.bound, optimal=s.optimal, baselines={}, skipped={},
            tried=[Tried(mesh=m.sizes, cost=c) for m, c in found.tried], seconds=seconds,
            provenance=_provenance(self.graph, s.method, s.certificate), traced=traced,
            graph_digest=raw_digest(traced.graph),
        )  # fmt: skip

    def plan_of(self, configs: Mapping[str, np.ndarray], mesh: Mesh, name: str, traced: Traced) -> Plan:
        """The plan of a strategy that was not searched for (a baseline, a transferred one), priced alike."""
        from pase.plan.assemble import assemble, raw_digest
        from pase.plan.itemize import collectives, node_costs

        moved = collectives(self.graph, mesh, configs, self.model)
        cost = sum(c.total for c in node_costs(self.graph, mesh, configs, self.model, moved, self.optimizer).values())
        return assemble(
            self.graph, mesh, configs, model=self.model, machine=self.machine, name=name, optimizer=self.optimizer,
            cost=cost, bound=0.0, optimal=False, baselines={}, skipped={}, tried=[], seconds={},
            provenance=_provenance(self.graph, "given", "none"), traced=traced, graph_digest=raw_digest(traced.graph),
        )  # fmt: skip


def _provenance(graph: Graph, method: str, certificate: str) -> dict[str, str]:
    import pase

    versions = {"pase": pase.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {k: sys.modules[k].__version__ for k in ("jax", "numpy") if k in sys.modules}
    return {
        **versions,
        "command": " ".join(sys.argv[:1] and [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "edges": str(len(graph.edges)),
        "search": method,
        "certificate": certificate,
    }
