"""Plans that move data, of small models on 8 host devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from pase import costmodels, machine, zoo
from pase.api import Problem
from pase.baselines import Baseline, baselines
from pase.frontends.from_jax import Traced, trace
from pase.machine import CostModel, Mesh, mesh_from
from pase.plan.types import Plan
from pase.tables.layouts import configs

DEVICES = 8


class DearCompute:
    """Compute costs so much that everything gets split, small as these models are."""

    name, unit = "dear_compute", "FLOP"

    def __init__(self, inner: CostModel) -> None:
        self.inner = inner

    def compute(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.inner.compute(*args, **kwargs) * 1e4

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A traced model and what it may be split by."""

    traced: Traced
    problem: Problem
    model: Any = None

    def plan(self, strategy: str) -> Plan | None:
        """``data_parallel`` and the like, ``ours``, ``ours@2x4`` (compute dear), ``random3@2x4``; None: no such."""
        name = self.traced.graph.name
        kind, _, shape = strategy.partition("@")
        if kind == "ours" and not shape:
            found = self.problem.search(self.problem.meshes(None, 3), lambda _: None, {})
            return self.problem.plan_of(found.configs, found.mesh, name, self.traced)
        if shape:
            dear = replace(self.problem, model=DearCompute(costmodels.get("paper", self.problem.machine)))
            mesh = mesh_from(shape, self.problem.devices)
            if kind.startswith("random"):
                chosen: Mapping[str, np.ndarray] = self._random(mesh, int(kind.removeprefix("random")))
            else:
                chosen = dear.search([mesh], lambda _: None, {}).configs
            return dear.plan_of(chosen, mesh, name, self.traced)
        p, (method, _, label) = self.problem, kind.partition("/")
        made = baselines(p.graph, p.devices, p.machine, p.model, only=(method,))
        for b in made:
            if isinstance(b, Baseline) and b.name.endswith(label):
                return p.plan_of(b.strategy, b.mesh, name, self.traced)
        return None

    def _random(self, mesh: Mesh, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        space = {n.name: configs(n, mesh) for n in self.problem.graph.nodes}
        return {name: rows[rng.integers(len(rows))] for name, rows in space.items()}


def case_of(fn: Any, params: Any, *batch: Any, name: str = "model", devices: int = DEVICES) -> Case:
    traced = trace(fn, params, *batch, name=name)
    problem = Problem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    return Case(traced=traced, problem=problem)


@cache
def reduced(name: str) -> Case:
    """A zoo model in its reduced size."""
    m = zoo.reduced(name)
    return replace(case_of(m.loss_fn, m.params, m.batch, name=f"zoo:{name}"), model=m)
