"""The search under a limit assumes that no variant of a step takes less time than the step as written."""

from __future__ import annotations

import numpy as np
import pytest

from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import variants
from pase.compiler.resolve import resolve
from pase.machine import mesh_from


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("model", "machine", "overlap"),
    [
        ("zoo:mlp?batch=64", "h100x8", "parameters"),
        ("zoo:mlp?batch=64", "tpu_v5e", "none"),
        ("zoo:gpt2?layers=4&batch=16", "h100x8", "none"),
        ("zoo:gpt2?layers=4&batch=16", "h100x8", "parameters"),
        ("zoo:gpt2?layers=4&batch=16&scan=0", "v100x8", "parameters"),
        ("zoo:mixtral_8x7b?layers=2&batch=16", "h100x8", "parameters"),
    ],
)
def test_no_variant_of_a_strategy_takes_less_than_the_step_as_written(model, machine, overlap):
    traced = resolve(model)
    problem = SplitProblem.of(traced.graph, 8, machine, "analytic", "adam", overlap)
    mesh, rng = mesh_from("2x4", 8), np.random.default_rng(0)
    groups = list(variants(traced, problem.graph, CompileOptions(devices=8, once="auto"), True))
    assert groups[0][0].accumulate == 1 and not groups[0][0].blocks
    # The search also tries the variants that differ from the first one only in what is hoisted.
    firsts = [problem.varied(traced, v) for v in groups[0] if not v.blocks]
    some = [v for group in groups[:3] for v in group if v.blocks or v.accumulate > 1]
    compared = 0
    for v in some:
        p = problem.varied(traced, v)
        space = p.pricing.space(mesh).configs
        for _ in range(40):
            drawn = {n.name: c[rng.integers(len(c))] for n, c in zip(p.graph.nodes, space, strict=True)}
            try:
                written = min(first.pricing.cost(mesh, drawn) for first in firsts)
            except KeyError:  # as written, a node has no such config or no such name
                continue
            compared += 1
            assert p.pricing.cost(mesh, drawn) >= written * (1 - 1e-9), v
    assert compared >= 20 * len(some)
