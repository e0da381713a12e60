"""Tables of stages and a pipelined plan, made once for all tests of stages."""

from __future__ import annotations

from functools import cache

import pase
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.resolve import traced_model
from pase.compiler.stages.menu import StageDevices, StageTables
from pase.compiler.stages.places import places_of
from pase.frontends.jax.blocks import blocks_of
from pase.machine import Mesh

SCANNED = "zoo:llama3_8b?layers=8&batch=32&seq=2048&vocab=2048&remat=0&attention=fused"
HEAVY_END = "zoo:gpt2?layers=12&batch=16&seq=128&vocab=400000&remat=0"
WRITTEN_OUT = "zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0&scan=0"


@cache
def tables_of(  # type: ignore[no-untyped-def]
    model: str, m: int, weights="each", again: bool = False, slow: float = 1.0
) -> StageTables:
    traced, _ = traced_model(model, None, (), CompileOptions(devices=8))
    blocks = blocks_of(traced)  # type: ignore[arg-type]
    variant = Variant(accumulate=m, blocks=blocks if again else ())
    problem = SplitProblem.of(traced.graph, 8, "h100x8", "analytic", "adam")
    graph = graph_of(traced, variant)
    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    places = places_of(graph, blocks)
    return StageTables(
        graph, places, variant, StageDevices(mesh=mesh, model=problem.model, slow=slow), "adam", weights
    )


@cache
def staged(**options):  # type: ignore[no-untyped-def]
    asked = {"devices": 8, "machine": "h100x8", "pipeline": 2, "mesh": "4", "accumulate": 4, "remat": "none"}
    return pase.compile(SCANNED, **asked | options)
