"""Plans of small models on 8 host devices that need communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

from pase import costmodels, machine, zoo
from pase.api import Plan
from pase.backends.audit.xla import CollectiveRow, StepResult, compare, sharded_step, unsharded_step
from pase.backends.jax.spmd.lower import Lowering
from pase.baselines import Baseline, baselines, masks
from pase.compiler.meshes.plans import plan_of
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.problem import SplitProblem
from pase.frontends.blocks import as_padded
from pase.frontends.jax.frontend import trace
from pase.frontends.registry import Traced
from pase.machine import CostModel, Mesh, mesh_from
from pase.tables.layouts import configs

DEVICES = 8
TOLERANCE = {"loss": 1e-5, "gradients": 5e-5, "parameters": 5e-5}
"""The largest differences between a sharded step and the unsharded one in float32; see ``StepResult.differences``."""


class ExpensiveCompute:
    """A cost model in which compute is so expensive that even these small models are split everywhere."""

    name, unit = "expensive_compute", "FLOP"

    def __init__(self, inner: CostModel) -> None:
        self.inner = inner

    def compute(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.inner.compute(*args, **kwargs) * 1e4

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A traced model, and its problem of splitting."""

    traced: Traced
    problem: SplitProblem
    model: Any = None

    def plan(self, strategy: str) -> Plan | None:
        """Returns the plan of a baseline (``data_parallel``), ``ours``, ``ours@2x4`` (expensive compute) or
        ``random3@2x4``.

        None if the strategy does not apply to the model.
        """
        name = self.traced.graph.name
        kind, _, shape = strategy.partition("@")
        if kind == "ours" and not shape:
            found = search_meshes(self.problem, self.problem.meshes(None, 3))
            return Plan.of(plan_of(self.problem, found.configs, found.mesh, name, self.traced))
        if shape:
            p = self.problem
            price = ExpensiveCompute(costmodels.get("paper", p.machine))
            expensive = SplitProblem(
                graph=p.graph,
                devices=p.devices,
                machine=p.machine,
                model=price,
                optimizer=p.optimizer,
                variant=p.variant,
            )
            mesh = mesh_from(shape, self.problem.devices)
            if kind.startswith("random"):
                chosen: Mapping[str, np.ndarray] = self._random(mesh, int(kind.removeprefix("random")))
            else:
                chosen = search_meshes(expensive, [mesh]).configs
            return Plan.of(plan_of(expensive, chosen, mesh, name, self.traced))
        p, (method, _, label) = self.problem, kind.partition("/")
        with patch.object(
            masks, "PERSISTENT_ELEMENTS", 0
        ):  # otherwise no parameter of these small models is split
            made = baselines(p.graph, p.devices, p.machine, p.model, only=(method,))
        for b in made:
            if isinstance(b, Baseline) and b.name.endswith(label):
                return Plan.of(plan_of(p, b.strategy, b.mesh, name, self.traced))
        return None

    def _random(self, mesh: Mesh, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        space = {n.name: configs(n, mesh) for n in self.problem.graph.nodes}
        return {name: rows[rng.integers(len(rows))] for name, rows in space.items()}


def case_of(
    fn: Any,
    params: Any,
    *batch: Any,
    name: str = "model",
    devices: int = DEVICES,
    padding: Mapping[int, int] | None = None,
    carry: Mapping[int, Any] | None = None,
) -> Case:
    """Returns the case of a function of (params, *batch), split on the first devices of an h100x8. padding: extent ->
    the extent to which its dims are padded. carry: as for ``pase.compile``."""
    traced = as_padded(trace(fn, params, *batch, name=name, carry=carry), padding or {})
    problem = SplitProblem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    return Case(traced=traced, problem=problem)


@cache
def reduced(name: str) -> Case:
    """Returns the case of a zoo model in its reduced size."""
    m = zoo.reduced(name)
    return replace(case_of(m.loss_fn, m.params, m.batch, name=f"zoo:{name}"), model=m)


@cache
def measured(
    model: str, strategy: str, lowering: Lowering = "annotated"
) -> tuple[dict[str, float], list[CollectiveRow]]:
    """Runs one step of a reduced zoo model, sharded and unsharded; returns the differences, and the bytes by kind."""
    import optax

    case = reduced(model)
    plan = case.plan(strategy)
    assert plan is not None, f"{model} has no strategy {strategy}"
    optimizer = optax.adam(1e-2, eps=1e-3)
    step = sharded_step(plan, optimizer, *case.model.init(0), lowering=lowering)
    whole = _whole(model, optimizer)
    return whole.differences(step), compare(plan, step.compiled, lowering)


def total_error(rows: Sequence[CollectiveRow]) -> float:
    """Returns the relative error of the sum of all bytes."""
    compiled, on_cpu = sum(r.compiled for r in rows), sum(r.on_cpu for r in rows)
    return (on_cpu - compiled) / compiled if compiled else float(on_cpu > 0)


_steps: dict[str, StepResult] = {}


def _whole(model: str, optimizer: Any) -> StepResult:
    m = reduced(model).model
    if model not in _steps:
        _steps[model] = unsharded_step(m.loss_fn, optimizer, *m.init(0))
    return _steps[model]


def distinct_models() -> list[str]:
    """Returns the zoo models that also differ in their reduced sizes."""
    first: dict[str, str] = {}
    for name in zoo.names():
        m = zoo.reduced(name)
        first.setdefault(str((m.params, m.batch)), name)
    return list(first.values())
