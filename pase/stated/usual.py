"""TP·PP·DP as people run it with Megatron: the fastest of the usual degrees that fits, as a stated strategy.

Tensor and sequence parallelism stay within a node or are left out, micro-batches have up to eight examples, stages
have as many chunks as the layers allow, optimizer state is sharded over the replicas, and attention is recomputed, or
whole layers if that does not fit (Narayanan et al. 2021, sections 3 and 5; Korthikanti et al. 2022). A strategy that
people choose by hand has these degrees, whatever the search finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.compiler.compilation import compile_model
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.errors import Infeasible
from pase.frontends.registry import Traced
from pase.machine import GroupedMachine
from pase.machine.meshes import level_ways
from pase.plan.types import PlanData
from pase.pytree import Tree
from pase.stated.model import price_model
from pase.stated.price import Priced
from pase.stated.program import PROGRAMS, Program
from pase.stated.strategy import parse

if TYPE_CHECKING:
    from pase.compiler.problem.options import CompileOptions

__all__ = ["NONE", "compile_with_usual", "usual_pipeline"]

_CHUNKS = (8, 4, 2, 1)
_MOST_STAGES = 64
_MICRO = (2, 4, 8)
"""Examples of a micro-batch on one replica that are tried after one."""


NONE = (
    "none of the usual degrees of tensor, pipeline and data parallelism divides its heads, layers and batch"
)


def compile_with_usual(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    progress: Progress | None = None,
) -> PlanData:
    """The plan of ``pase.compile``. If it may have stages, this strategy is among its baselines, priced as a compiled
    program runs it."""
    done = compile_model(model, params, batch, options, progress)
    plan, asked = done.plan, options.pipeline != "none" and options.mode == "train" and options.baselines
    if not asked or done.problem.model.unit != "s" or isinstance(done.problem.machine, GroupedMachine):
        return plan
    found = usual_pipeline(done.problem, done.traced, progress or (lambda _: None), PROGRAMS["xla"])
    if found is None:
        return replace(plan, skipped={**plan.skipped, "megatron with stages": NONE})
    s = found.strategy
    name = f"megatron_tp{s.tensor}_pp{s.pipeline}_dp{s.ranks}"
    return replace(
        plan,
        baselines={**plan.baselines, name: found.step_s},
        baseline_memory={**plan.baseline_memory, name: round(found.memory.total - found.memory.reserve)},
    )


def usual_pipeline(problem: SplitProblem, traced: Traced, say: Progress, program: Program) -> Priced | None:
    """The fastest of the usual strategies that were tried, among those that fit if any does. None if the model cannot
    be cut so.

    For each tensor degree, stages are doubled until a plan fits and twice as many are slower, with one example in a
    micro-batch; then the fastest of them gets larger micro-batches as long as these make it faster. Few stages may
    leave more replicas than the batch has examples, so all numbers of stages are tried until one divides. Tensor
    degrees begin at a whole node and become less as long as that is faster.

    problem: of the whole step, on the devices. It needs a step in seconds.
    """
    if problem.model.unit != "s":
        return None
    node = level_ways(problem.devices, problem.machine)[0]
    best: Priced | None = None
    for tensor in (node // n for n in range(1, node + 1) if node % n == 0):
        found = _best_stages(problem, traced, tensor, program, say)
        if best is not None and found is not None and _rank(found) >= _rank(best):
            break
        best = found or best
    return best


def _best_stages(
    problem: SplitProblem, traced: Traced, tensor: int, program: Program, say: Progress
) -> Priced | None:
    """The fastest that was tried at this tensor degree."""
    best: Priced | None = None
    stages, fitted = 2, False
    while stages <= min(_MOST_STAGES, problem.devices // tensor) and problem.devices % (tensor * stages) == 0:
        found = _most_chunks(problem, traced, tensor, stages, 1, program, say)
        if found is not None and (best is None or _rank(found) < _rank(best)):
            best = found
        elif found is not None and fitted:  # more stages cost bubbles, and fewer fit already
            break
        fitted = fitted or (found is not None and found.fits)
        stages *= 2
    for micro in _MICRO:
        if best is None:
            break
        found = _most_chunks(problem, traced, tensor, best.strategy.pipeline, micro, program, say)
        if found is None or _rank(found) >= _rank(best):
            break
        best = found
    return best


def _rank(p: Priced) -> tuple[bool, float]:
    return not p.fits, p.step_s


def _most_chunks(
    problem: SplitProblem,
    traced: Traced,
    tensor: int,
    stages: int,
    micro: int,
    program: Program,
    say: Progress,
) -> Priced | None:
    """The strategy with as many chunks per stage as the layers allow, and the least recomputation that fits."""
    data = problem.devices // (tensor * stages)
    terms = [*([f"dp={data}", "zero=1"] if data > 1 else []), *([f"tp={tensor}", "sp"] if tensor > 1 else [])]
    for chunks in _CHUNKS:
        vp = [f"vp={chunks}"] if chunks > 1 else []
        text = ",".join([*terms, f"pp={stages}", *vp, f"micro={micro}"])
        say(f"pricing {text}")
        made: Priced | None = None
        try:
            for remat in ("selective", "full"):
                made = price_model(problem, traced, parse(f"{text},remat={remat}", problem.devices), program)
                if made.fits:
                    break
        except Infeasible:  # these degrees do not divide its heads, its layers or its batch
            continue
        return made
    return None
