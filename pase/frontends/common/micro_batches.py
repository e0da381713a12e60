"""Whether a step in micro-batches computes what a step of the whole batch does, for models of any frontend.

The model is traced on the whole batch and on one micro-batch, and the two graphs are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest

from pase.frontends.blocks import block_ways
from pase.frontends.registry import NotInParts, Traced
from pase.ir import Graph, Op, Place, named, simplify
from pase.ir.batch_sums import BatchSums, ExamplesMeet, batch_sums, counting_ops
from pase.ir.constants import number_power
from pase.ir.two_batches import Otherwise, PowersInGraph, TwoBatches, depends_on, depends_on_data
from pase.once import once

__all__ = ["OUTSIDE", "check_mean", "examples_meet", "micro_sums", "step_sums"]

OnBatch = Callable[[int], Traced]
"""The model traced on a batch of so many examples."""


OUTSIDE = (
    "compute this sum outside the function and pass it as an argument; a mean over what counts is then "
    "(losses * weights).sum(1).mean() * scale, with scale = examples / weights.sum()"
)
"""What to do about a sum over the batch that depends on no parameter, if a step takes the mean of its losses."""


def examples_meet(
    graph: Graph, cut: Collection[str], *, state_of_whole: bool, of_loops: bool = False
) -> str | None:
    """Where the examples of a batch meet, so that a step in micro-batches would give other results; None if nowhere.

    graph: the simplified graph of the whole batch. cut: the paths of the inputs that have the batch's dim.
    state_of_whole, of_loops: see ``batch_sums``. Numbers that grow with the batch are checked by ``micro_sums``.
    """
    try:
        batch_sums(graph, cut, None, state_of_whole=state_of_whole, of_loops=of_loops)
    except ExamplesMeet as e:
        return str(e)
    return None


def step_sums(whole: Traced, micro_batches: int) -> BatchSums:
    """What the micro-batches of a step pass on to each other. whole: the model on the whole batch.

    Raises NotInParts if a step in micro-batches would give other results, or if it cannot give a micro-batch the sums
    over the batch that it reads.
    """
    return _sums_in_graph(whole, micro_batches)[0]


@once
def _sums_in_graph(whole: Traced, micro_batches: int) -> tuple[BatchSums, Graph]:
    """The same, and the simplified graph of a micro-batch, whose tensors and ops it names."""
    ways = block_ways(whole)
    part, examples = ways.micro(whole, micro_batches), ways.batch_size(whole) // micro_batches
    ways.check_micro(whole, micro_batches)
    graph, on_batch = named(simplify(part.graph, part.graph)), partial(ways.on_batch, whole)
    sums = micro_sums(
        whole,
        part,
        graph,
        examples,
        on_batch,
        state_of_whole=ways.state_of_whole,
        of_loops=ways.sums_of_loops,
    )
    if not ways.state_of_whole:
        sums = _of_loss(sums, graph)
    ways.check_sums(part, graph, sums, micro_batches)
    return sums, graph


def micro_sums(
    whole: Traced,
    part: Traced,
    graph: Graph,
    examples: int,
    on_batch: OnBatch,
    *,
    state_of_whole: bool,
    of_loops: bool = False,
) -> BatchSums:
    """What the micro-batches of a step pass on to each other.

    whole, part: the model traced on the whole batch and on one micro-batch of so many ``examples``. graph: the
    simplified graph of ``part``. state_of_whole, of_loops: see ``batch_sums``. Raises NotInParts if a step in
    micro-batches would give other results.
    """
    size = _examples(whole, part, examples)
    try:
        if examples > 1:
            return _sums(whole, part, graph, size // examples, state_of_whole, of_loops)
        # The graph of a single example has no batch dim, so two examples are analyzed instead.
        pair = on_batch(2)
        many = whole if size > 2 and size % 2 == 0 else on_batch(4)
        k = _examples(many, pair, 2) // 2
        found = _sums(many, pair, named(simplify(pair.graph)), k, state_of_whole, of_loops)
        _check_single(many, pair, part, k)
        return _of_part(found, pair, part, graph)
    except (ExamplesMeet, Otherwise) as e:
        met = "examples of the batch meet in " if isinstance(e, ExamplesMeet) else "the programs of "
        told = (
            f"'{whole.graph.name}' on the batch and on a micro-batch have "
            if isinstance(e, Otherwise)
            else ""
        )
        raise NotInParts(
            f"a step in {size // examples} micro-batches would give other numbers: {met}{told}{e}",
            fix="write the model so that its code does not depend on the batch's size" if told else "",
        ) from None


def check_mean(whole: Traced, micro_batches: int) -> None:
    """Raises NotInParts if the mean of the micro-batches' losses is not the loss of the whole batch."""
    sums, graph = _sums_in_graph(whole, micro_batches)
    sums, name = _of_loss(sums, graph), whole.graph.name
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    if sums.totals:
        op = makers[next(iter(sums.totals))]
        raise NotInParts(
            f"a step in {micro_batches} micro-batches would give other numbers: the loss of '{name}' depends on "
            f"{op.name} at {op.source or 'an unknown line'}, a sum over the batch, of which a micro-batch has only its "
            f"own part",
            fix=OUTSIDE,
        )
    if sums.scaled:
        at = " and ".join(str(makers[t].source or makers[t].name) for t in sums.scaled)
        raise NotInParts(
            f"a step in {micro_batches} micro-batches would give other numbers: the loss of '{name}' adds a sum over "
            f"the batch to a mean over the batch, at {at}, but a step takes the mean of its micro-batches' losses",
            fix="divide the sum by the batch's size (jnp.mean)",
        )
    power = next(iter(sums.outputs.values()), 1)
    if power != 1:
        grows = (
            "a sum over the batch" if power == 0 else f"proportional to the batch's size ** {power - 1:+d}"
        )
        raise NotInParts(
            f"a step in {micro_batches} micro-batches would give other numbers: the loss of '{name}' is {grows}, but "
            f"a step takes the mean of its micro-batches' losses",
            fix="divide it by the batch's size (jnp.mean)",
        )


def _sums(
    whole: Traced, part: Traced, graph: Graph, k: int, state_of_whole: bool, of_loops: bool
) -> BatchSums:
    both = TwoBatches(whole=whole.full, part=part.full, k=k)
    powers = PowersInGraph(both=both, graph=part.graph)
    return batch_sums(graph, both.cut, powers, state_of_whole=state_of_whole, of_loops=of_loops)


def _examples(whole: Traced, part: Traced, examples: int) -> int:
    """The number of examples of the whole batch, of which ``part`` has so many."""
    own = {t.path: t.shape for t in part.graph.tensors.values() if t.role == "input"}
    every = ((t.shape, own.get(t.path)) for t in whole.graph.tensors.values() if t.role == "input")
    return next((int(a[0]) for a, b in every if b is not None and a != b), examples)  # type: ignore[arg-type]


def _of_loss(sums: BatchSums, graph: Graph) -> BatchSums:
    """What the loss, the graph's first output, depends on: another result's own sums are its micro-batch's."""

    def read(t: str) -> bool:
        return graph.outputs[0] in depends_on(graph, {t})

    totals = {t: power for t, power in sums.totals.items() if read(t)}
    scaled = {t: powers for t, powers in sums.scaled.items() if read(t)}
    return replace(sums, totals=totals, scaled=scaled, counting=counting_ops(graph, totals))


def _check_single(many: Traced, pair: Traced, single: Traced, k: int) -> None:
    """Raises Otherwise if the program of one example computes something else than those of two and of 2 k examples.
    Views may differ: a dim of one element needs no broadcast."""
    for a, b, c in zip_longest(*map(_computed, (many, pair, single))):
        if a is None or b is None or c is None or (b.kind, b.function) != (c.kind, c.function):
            one, other = (x.name if x else "none" for x in (b, c))
            raise Otherwise(f"other operations for one example, {one} and {other}, at {(b or c).source}")
        grown = number_power(b.numbers or (), c.numbers or (), 2)
        if grown is None or grown != number_power(a.numbers or (), b.numbers or (), k):
            raise Otherwise(
                f"other numbers in {c.name} for one example, {b.literals} and {c.literals}, at {c.source}"
            )


def _computed(traced: Traced) -> Iterator[Op]:
    data = depends_on_data(traced.graph)
    for n in traced.graph.nodes:
        for op in n.ops:
            moved = op.kind in ("view", "copy", "input", "parameter") or op.backward
            if not moved and any(a.tensor in data for a in op.writes):
                yield op


def _of_part(sums: BatchSums, pair: Traced, part: Traced, graph: Graph) -> BatchSums:
    """The sums found in the graph of two examples, for the tensors of the graph of one example."""
    one = {place: t for t, place in _places(part).items()}
    every = _places(pair)
    if missing := next((t for t in (*sums.totals, *sums.scaled) if every[t] not in one), None):
        raise ExamplesMeet(
            f"{every[missing][1]} at {every[missing][0]}, which the graph of one example does not have"
        )
    totals = {one[every[t]]: power for t, power in sums.totals.items()}
    outputs = zip(part.graph.outputs, sums.outputs.values(), strict=True)
    return BatchSums(
        totals=totals,
        outputs=dict(outputs),
        counting=counting_ops(graph, totals),
        scaled={one[every[t]]: powers for t, powers in sums.scaled.items()},
    )


def _places(traced: Traced) -> dict[str, tuple[Place, str, int]]:
    """Tensor -> place and name of the op that writes it, and the number of earlier tensors with both the same."""
    found: dict[str, tuple[Place, str, int]] = {}
    before: Counter[tuple[Place, str]] = Counter()
    for n in traced.graph.nodes:
        for op in n.ops:
            for a in op.writes:
                found[a.tensor] = (op.eqn, op.name, before[op.eqn, op.name])
                before[op.eqn, op.name] += 1
    return found
