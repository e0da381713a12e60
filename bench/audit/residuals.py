"""Audits residuals: what backward keeps, against JAX and PyTorch.

    python -m bench audit.residuals           # all groups: zoo, patterns, composer, torch; minutes
    python -m bench audit.residuals zoo       # this group again
    python -m bench audit.residuals composer --seeds 10

Everything is on one device. A row has bytes, without parameters and inputs. ``kept``: what the plan says backward keeps
of forward (without what a rematerialized region recomputes). ``listed``: what ``jax.linearize`` lists or PyTorch's
autograd saves, counted by distinct storage. ``fused``: the part of JAX's list that a compiler keeps at least
(``bench.audit.residuals_jax``). ``explanation``: why ``kept`` is not within 10% of ``listed``; null if it is, and
"unexplained" if no known reason suffices. Writes bench/results/residual_truth.json.
"""

from __future__ import annotations

import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.runner import Benchmark, option
from pase.tables.layouts import concrete_size

if TYPE_CHECKING:
    from bench.audit.residuals_jax import Residuals
    from bench.composer.spec import Spec
    from pase.ir import Graph

SMALL = 1024
"""A difference of fewer bytes is ignored."""
WITHIN = 0.1
SEEDS = 100


def zoo_rows() -> Iterator[dict[str, Any]]:
    """Yields the zoo's models in full and reduced size, with their own recomputation and with all residuals kept."""
    from bench.cases.plans import distinct_models
    from pase import zoo

    for name in distinct_models():
        for spec, get in ((name, zoo.reduced), (name, zoo.get), (f"{name}?remat=0", zoo.reduced)):
            try:
                m = get(spec)
            except Exception as e:
                if "remat" not in spec:
                    raise
                print(f"{spec}: {e}")
                continue
            size = "full" if get is zoo.get else "reduced"
            if m.task == "train":
                yield _jax_row(f"{spec} {size}", m.loss_fn, m.params, *m.inputs)


def pattern_rows() -> Iterator[dict[str, Any]]:
    """Yields the rows of small programs, one for each pattern."""
    from tests.memory.patterns import PATTERNS, pattern
    from tests.memory.programs import JAX_LOOPS, jax_loop

    for name in PATTERNS:
        yield _jax_row(name, *pattern(name))
    for name in JAX_LOOPS:
        yield _jax_row(f"loop {name}", *jax_loop(name, 32))


def composer_rows(seeds: int = SEEDS) -> Iterator[dict[str, Any]]:
    """Yields the rows of programs that the composer draws, without those that carry state."""
    from bench.composer.jax_programs import LAYERS, draw

    for seed in range(seeds):
        spec = draw(seed)
        if all(LAYERS[part.pattern].holds is None for part in spec.parts):
            yield _jax_row(f"seed {seed}", *loss_of(spec))


def loss_of(spec: Spec) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """Returns (loss, parameters, batch) of a composed program, without its metrics."""
    from bench.composer.jax_programs import program_of

    program = program_of(spec)

    def loss(p: Any, b: Any) -> Any:
        out = program.loss(p, b)
        return out[0] if program.metrics else out

    return loss, program.params, program.batch


def torch_rows() -> Iterator[dict[str, Any]]:
    """Yields the rows of PyTorch modules: those of the tests, and small models of transformers."""
    from bench.audit.residuals_torch import row
    from tests.backends.torch import models

    for name, make in models.MODELS.items():
        yield _guarded(name, lambda make=make: row(*make()))


def _jax_row(name: str, loss: Callable[..., Any], params: Any, *batch: Any) -> dict[str, Any]:
    def made() -> dict[str, Any]:
        from bench.audit.residuals_jax import residuals
        from pase.frontends import registry
        from pase.ir import named, simplify
        from pase.memory.residuals import kept_bytes

        graph = named(simplify(registry.trace(loss, params, *batch).graph))
        kept = kept_bytes(graph)
        found = residuals(loss, params, *batch)
        row: dict[str, Any] = {"kept": kept, **asdict(found), "scores": scores_of(graph)}
        row["ratio"] = _ratio(kept, found.listed)
        row["explanation"] = explained(kept, found, row["scores"])
        return row

    return _guarded(name, made)


def _guarded(name: str, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the row, or the error."""
    try:
        row = {"program": name} | made()
    except Exception as e:
        row = {"program": name, "error": f"{type(e).__name__}: {str(e)[:200]}"}
        traceback.print_exc(limit=1)
    print(row, flush=True)
    return row


def _ratio(kept: int, truth: int) -> float | None:
    return round(kept / truth, 4) if truth else None


def _near(kept: int, truth: int) -> bool:
    return abs(kept - truth) <= max(WITHIN * truth, SMALL)


def explained(kept: int, found: Residuals, scores: int) -> str | None:
    """Returns why kept is not near listed; None if it is, and "unexplained" if no known reason suffices."""
    if _near(kept, found.listed):
        return None
    if _within(kept, found.fused, found.listed):
        return "made again in the fusions that read it"
    if _within(kept + found.of_weights, found.fused, found.listed):
        return "made of weights alone, which the account has as weights"
    if scores and _within(kept + found.of_weights + scores, found.fused, found.listed):
        return "attention is one kernel, which keeps no scores"
    return "unexplained"


def _within(kept: int, least: int, most: int) -> bool:
    return _near(kept, least) or _near(kept, most) or least <= kept <= most


def scores_of(graph: Graph) -> int:
    """Returns the bytes of two arrays of scores for each attention op; attention written as products keeps them."""
    total = 0
    for op in (op for n in graph.nodes for op in n.ops if op.kind == "attention"):
        q, k = (graph.tensors[a.tensor] for a in op.reads[:2])
        heads = concrete_size(q.elements, q.name) // concrete_size(q.shape[-1], q.name)
        total += 2 * heads * concrete_size(k.shape[1], k.name) * q.itemsize
    return total


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many rows are near, explained, unexplained, or failed."""
    done = [r for r in rows if "error" not in r]
    return {
        "programs": len(rows),
        "within_10_percent": sum(r["explanation"] is None for r in done),
        "explained": sum(r["explanation"] not in (None, "unexplained") for r in done),
        "unexplained": sum(r["explanation"] == "unexplained" for r in done),
        "errors": len(rows) - len(done),
    }


GROUPS = {"zoo": zoo_rows, "patterns": pattern_rows, "composer": composer_rows, "torch": torch_rows}


def measured(group: str, given: Namespace) -> dict[str, Any]:
    """Returns the rows of one group of programs, with their summary."""
    began = time.perf_counter()
    rows = list(composer_rows(given.seeds) if group == "composer" else GROUPS[group]())
    return summary(rows) | {"seconds": round(time.perf_counter() - began), "rows": rows}


BENCH = Benchmark(
    "residual_truth",
    list(GROUPS),
    measured,
    at="groups",
    options=[option("--seeds", type=int, default=SEEDS, help="how many programs of the composer")],
)
