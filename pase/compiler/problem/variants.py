"""Ways to run a step in less memory: micro-batches with summed gradients, and recomputation of repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pase.errors import PaseError
from pase.frontends.blocks import BLOCKS, block_ways
from pase.frontends.common.micro_batches import check_mean, examples_meet, step_sums
from pase.frontends.registry import NotInParts
from pase.ir.blocks import (
    Block,
    Hoisted,
    accumulated,
    attention_cores,
    gathering_again_text,
    hoisted_text,
    kept_results,
    recompute_text,
    rematerialised,
)
from pase.ir.precision import FP8, in_fp8
from pase.ir.recompute import gathering_again
from pase.tables.decompose import Decompose, decomposed

if TYPE_CHECKING:
    from pase.compiler.problem.options import CompileOptions
    from pase.frontends.registry import Traced
    from pase.ir import Graph

__all__ = [
    "Candidate",
    "ProductPrecision",
    "Variant",
    "check_replicas",
    "graph_of",
    "recomputed",
    "untried",
    "variants",
]

ProductPrecision = Literal["model", "fp8"]
"""The precision of products with weights: the model's own, or eight bits."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run the model's step.

    accumulate: the number of micro-batches.
    blocks: those that backward recomputes.
    precision: the precision of products with weights.
    hoisted: which collectives of parameters run once per step, not per micro-batch and per read.
    gathers_again: whether backward gathers parameters again, instead of keeping them gathered from forward on.
    decompose: which collectives the executor decomposes.
    """

    accumulate: int = 1
    blocks: tuple[Block, ...] = ()
    precision: ProductPrecision = "model"
    hoisted: Hoisted = "none"
    gathers_again: bool = False
    decompose: Decompose = "none"

    def __str__(self) -> str:
        parts = [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        parts += hoisted_text(self.hoisted)
        parts += gathering_again_text(self.gathers_again)
        return " and ".join([*parts, *recompute_text(self.blocks)]) or "as written"


def graph_of(traced: Traced, variant: Variant) -> Graph:
    """Return the graph of a variant, for the search. Raises PaseError if the batch is not divisible."""
    from pase.ir import named, simplify

    raw = traced.graph
    if variant.accumulate > 1:
        raw = block_ways(traced).micro(traced, variant.accumulate).graph
    graph = named(simplify(rematerialised(raw, variant.blocks), raw))
    if variant.accumulate > 1:
        _check_micro(traced, variant.accumulate, False)
    exact = in_fp8(graph, FP8) if variant.precision == "fp8" else graph
    exact = decomposed(exact) if variant.decompose == "products" else exact
    whole = accumulated(exact, variant.accumulate, variant.hoisted)
    if not variant.gathers_again:
        return whole
    return gathering_again(replace(whole, facts=replace(whole.facts, frees_gathered=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A variant of a model's step and its graph, which is made when it is first needed: that takes long, and most
    searches end before the last variant."""

    traced: Traced
    variant: Variant

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.traced, self.variant)


def check_replicas(traced: Traced, micro_batches: int) -> None:
    """Raise NotInParts if replicas that each run some of the micro-batches would give other numbers: a step takes the
    mean of their losses."""
    _check_micro(traced, micro_batches, True)


def _check_micro(traced: Traced, micro_batches: int, mean: bool) -> None:
    """Raise NotInParts if micro-batches would give other numbers. mean: a step takes the mean of their losses."""
    if traced.written is not None:
        _check_micro(traced.written, micro_batches, True)  # padding adds no sums, but its masks hide numbers
        return
    step_sums(traced, micro_batches)
    if mean:
        check_mean(traced, micro_batches)


def _meet(traced: Traced, graph: Graph) -> str | None:
    """Return where examples of the batch meet, so that micro-batches would give other numbers; None if nowhere."""
    ways = BLOCKS.get(traced.frontend)
    if ways is None:
        return None
    return examples_meet(
        graph,
        ways.batch_inputs(traced),
        state_of_whole=ways.state_of_whole,
        of_loops=ways.sums_of_loops,
    )


def variants(traced: Traced, graph: Graph, options: CompileOptions, limited: bool) -> Iterator[list[Variant]]:
    """Yield the variants to try, in order, grouped by number of micro-batches.

    The first one applies if memory is no constraint: no other takes less time, except those that differ only in
    ``once``. Whatever the options fix stays fixed; accumulate=None, remat="auto", once="auto" and regather="auto" fix
    nothing.

    graph: the simplified graph.
    limited: whether there is a memory limit.
    """
    accumulate, remat = options.accumulate, options.remat
    trained = traced.mode == "train"  # without training, nothing is kept for backward
    if accumulate not in (None, 1) and not trained:
        raise PaseError(
            f"only a loss is run in micro-batches, not a model with mode='{traced.mode}'",
            where="accumulate",
            fix="leave it out",
        )
    marked = any(op.remat for n in graph.nodes for op in n.ops)
    free = limited and traced.frontend in BLOCKS and trained
    if remat in ("auto", "none"):
        regions = list(_regions(traced)) if remat == "auto" and free else [()]
    else:
        regions = [recomputed(traced, remat)]
        if not regions[0] and not (remat == "all" and marked):
            raise PaseError(
                f"'{graph.name}' has no repeated block{_LACKS[remat]} to recompute: no loop over layers and no three "
                f"equal layers{' that are not marked already' if marked else ''}",
                where=f"remat='{remat}'",
                fix="mark regions with jax.checkpoint or torch.utils.checkpoint",
            )
    mixed = _meet(traced, graph) if free or accumulate not in (None, 1) else None
    if accumulate not in (None, 1) and mixed:
        raise NotInParts(
            f"a step in micro-batches would give other numbers: examples of the batch meet in {mixed}",
            where=f"accumulate={accumulate}",
            fix="leave it out",
        )
    sizes = [accumulate] if accumulate else list(_powers(traced)) if free and not mixed else [1]
    asked = _asked_hoisted(options.once, traced, trained)
    again = _gathered_again_choices(options.regather, traced, trained, free)
    groups = [
        [
            Variant(
                accumulate=k,
                blocks=b,
                precision=options.precision,
                hoisted=o,
                gathers_again=g,
                decompose=options.decompose,
            )
            for b in regions
            for o in _hoisted_choices(asked, k, bool(b) or marked)
            for g in again
        ]
        for k in sizes
    ]
    if asked in ("gathers", "all") and all(v.hoisted == "none" for group in groups for v in group):
        raise PaseError(
            f"there is nothing to hoist, because the step has one micro-batch"
            f"{'' if asked == 'all' else ' and recomputes nothing'}",
            where=f"once='{asked}'",
            fix="set accumulate",
        )
    yield from groups


def untried(traced: Traced, graph: Graph, tries: Iterable[Iterable[Variant]], options: CompileOptions) -> str:
    """Return which ways to take less memory ``variants`` left out although the options allow them, and why; "" if
    none."""
    if traced.mode != "train":
        return ""
    if traced.frontend not in BLOCKS:
        return "Not tried: micro-batches and recomputation, which need a JAX function or a PyTorch module"
    every = [v for group in tries for v in group]
    said = []
    if options.accumulate is None and all(v.accumulate == 1 for v in every):
        said.append(f"micro-batches, because {_whole_because(traced, graph)}")
    marked = any(op.remat for n in graph.nodes for op in n.ops)
    if options.remat == "auto" and not marked and not any(v.blocks for v in every):
        said.append(
            "recomputation, because the model has no loop over layers and no three equal layers (mark regions with "
            "jax.checkpoint or torch.utils.checkpoint)"
        )
    return f"Not tried: {'; '.join(said)}" if said else ""


def _whole_because(traced: Traced, graph: Graph) -> str:
    """Return why the batch is not cut into micro-batches."""
    if (mixed := _meet(traced, graph)) is not None:
        return f"examples of the batch meet in {mixed}"
    try:
        return f"a batch of {block_ways(traced).batch_size(traced)} does not divide by 2"
    except PaseError as e:
        return e.what


def _asked_hoisted(
    hoisted: Hoisted | Literal["auto"], traced: Traced, trained: bool
) -> Hoisted | Literal["auto"]:
    """Return what may be hoisted: nothing if none of our backends could run it."""
    ways = BLOCKS.get(traced.frontend)
    hoists = ways is not None and ways.hoists
    if hoists and trained:
        return hoisted
    if hoisted in ("none", "auto"):
        return "none"
    raise PaseError(
        f"it needs a loss in JAX, but '{traced.graph.name}' is "
        + ("not trained" if hoists else f"from the {traced.frontend} frontend"),
        where=f"once='{hoisted}'",
        fix="leave it out",
    )


def _hoisted_choices(
    hoisted: Hoisted | Literal["auto"], micro_batches: int, recompute: bool
) -> tuple[Hoisted, ...]:
    """Return the choices of what to hoist that differ, the most first.

    recompute: whether recomputation reads parameters again.
    """
    differ: tuple[Hoisted, ...] = ("none",)
    if micro_batches > 1:
        differ = ("all", "gathers", "none")
    elif recompute:
        differ = ("gathers", "none")
    if hoisted == "auto":
        return differ
    return (hoisted,) if hoisted in differ else (differ[0] if hoisted == "all" else "none",)


def _gathered_again_choices(
    asked: Literal["none", "all", "auto"], traced: Traced, trained: bool, free: bool
) -> tuple[bool, ...]:
    """Return whether backward gathers parameters again, the ways that take less time first.

    free: whether ways are tried that need less memory.
    """
    ways = BLOCKS.get(traced.frontend)
    runs = ways is not None and ways.gathers_again
    if asked == "none" or (asked == "auto" and not (runs and free)):
        return (False,)
    if asked == "auto":
        return (False, True)
    if runs and trained:
        return (True,)
    model, compiler = (
        f"'{traced.graph.name}'",
        f"the {traced.frontend} frontend, whose compiler keeps what is gathered",
    )
    raise PaseError(
        f"it is for a loss that is trained, which {model} is not"
        if runs
        else f"it is for PyTorch, but {model} is from {compiler}",
        where="regather='all'",
        fix="leave it out"
        + ("" if runs else ", or recompute blocks (remat='all'), which gather again what they read"),
    )


_LACKS = {"all": "", "light": " with products", "attention": " with an attention"}
_MANY = 3
"""If there are more blocks than this, recomputing half of them is also tried."""


def recomputed(traced: Traced, what: str) -> tuple[Block, ...]:
    """Return the repeated blocks that the model does not mark itself, as backward recomputes them.

    what: "attention", from the scores to the result; "light", everything but results of products with weights and of
        fused attention; or "all".
    """
    return _in_part(traced.graph, block_ways(traced).blocks_of(traced), what)


def _in_part(raw: Graph, blocks: tuple[Block, ...], what: str) -> tuple[Block, ...]:
    """Return the part of the blocks that is recomputed."""
    if what == "attention":
        return attention_cores(raw, blocks)
    if what == "light":
        light = tuple(replace(b, recompute="light") for b in blocks)
        return light if kept_results(raw, light) else ()
    return blocks


def _regions(traced: Traced) -> Iterator[tuple[Block, ...]]:
    """Yield sets of ops to recompute, in order of work.

    These are nothing, the attention of each block, light work, half of the blocks with light work in the others, and
    everything.
    """
    whole = recomputed(traced, "all")
    attention, light = (_in_part(traced.graph, whole, what) for what in ("attention", "light"))
    yield ()
    yield from (blocks for blocks in (attention, light) if blocks and blocks != whole)
    if len(whole) > _MANY:
        half = len(whole) // 2
        yield whole[:half]
        if light:
            yield (*whole[:half], *light[half:])
    if whole:
        yield whole


def _powers(traced: Traced) -> Iterator[int]:
    yield 1
    try:
        size = block_ways(traced).batch_size(traced)
    except PaseError:
        return
    k = 2
    while size % k == 0:
        yield k
        k *= 2
