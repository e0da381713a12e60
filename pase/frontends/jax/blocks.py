"""A traced JAX model's repeated blocks, and its trace on a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pase.errors import PaseError
from pase.frontends.blocks import BLOCKS, BlockWays
from pase.frontends.common.micro_batches import OUTSIDE
from pase.frontends.common.repeats import crossing, equal_runs
from pase.frontends.jax.draws import draws_of_batch
from pase.frontends.jax.frontend import INLINED, TracedJax, inlined, inner_jaxpr, trace
from pase.frontends.jax.leaves import combine
from pase.frontends.jax.rules import row_by_row
from pase.frontends.jax.types import Aval, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, scan_groups, source_line
from pase.frontends.registry import NotInParts
from pase.ir import Graph, Place
from pase.ir.batch_sums import BatchSums
from pase.ir.blocks import Block
from pase.ir.two_batches import depends_on
from pase.once import once

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

_CallVar: TypeAlias = tuple[str, Var]
"""A variable, and the path of the call in which it is."""
_EqnValues: TypeAlias = tuple[Eqn, list[_CallVar | None], list[_CallVar]]

__all__ = [
    "batch_inputs",
    "batch_size",
    "blocks_of",
    "check_handed_on",
    "check_totals",
    "loop_line",
    "loops_of",
    "micro",
    "on_batch",
    "one_loop",
    "why_no_program",
]

_REMAT = frozenset({"remat", "remat2", "checkpoint"})
_HEAVY = frozenset({"dot_general", "conv_general_dilated"})


def blocks_of(traced: TracedJax, *, marked: bool = False) -> tuple[Block, ...]:
    """The bodies of loops over layers, and equal runs of equations from unrolled layers.

    A block contains a product or a convolution. Equal runs are cut at the places that the fewest bytes cross. Blocks
    that the user already rematerialises are left out, but with ``marked``, runs of them are included.
    """
    return tuple(_blocks(traced.jaxpr.jaxpr, "", marked))


def loops_of(traced: TracedJax, trip_count: int) -> tuple[str, ...]:
    """The paths of the outermost loops with this trip count that contain a product or a convolution, whether or not the
    user rematerialises them."""
    return tuple(path for path, _ in _loops(traced.jaxpr.jaxpr, trip_count, ""))


def one_loop(traced: TracedJax, trip_count: int) -> bool:
    """Whether there is exactly one such loop, and one program can run its iterations (see ``why_no_program``)."""
    return len(loops_of(traced, trip_count)) == 1 and not why_no_program(traced, trip_count)


def loop_line(traced: TracedJax, trip_count: int) -> str:
    """The user's line of the only such loop."""
    ((_, eqn),) = _loops(traced.jaxpr.jaxpr, trip_count, "")
    return str(source_line(eqn) or "an unknown line")


def why_no_program(traced: TracedJax, trip_count: int) -> str:
    """Why one program cannot run the iterations of the only such loop, or "" if it can."""
    ((_, eqn),) = _loops(traced.jaxpr.jaxpr, trip_count, "")
    consts, carried = scan_groups(eqn)
    if eqn.params["reverse"]:
        return "runs in reverse"
    if len(eqn.outvars) > carried:
        return "returns more than its carry"
    arguments = set(traced.jaxpr.jaxpr.invars)
    if any(not is_literal(v) and v in arguments for v in eqn.invars[consts : consts + carried]):
        return "begins with an argument of the function, which only the first stage has"
    if not _own_rows(traced, eqn):
        return "reads stacks by rows that are no parameters, or that are read outside of it, too"
    return ""


def _own_rows(traced: TracedJax, loop: Eqn) -> bool:
    """Whether the stacks of a loop are parameters, or made of parameters row by row, that nothing else reads, so that a
    stage needs only its own rows."""
    jaxpr = traced.jaxpr.jaxpr
    steps, results = _straight(jaxpr, {}, "")
    beside, first = set(results), sum(scan_groups(loop))
    for eqn, ins, outs in reversed(steps):
        if eqn is loop:
            beside.update(ins[:first])
        elif not row_by_row(eqn) or outs[0] in beside:
            beside.update(ins)
    rows = {("", v) for v in jaxpr.invars[: len(traced.param_paths)]} - beside
    for eqn, ins, outs in steps:
        if eqn is loop:
            return rows.issuperset(v for v in ins[first:] if v is not None)
        if row_by_row(eqn) and rows.issuperset(v for v in ins if v is not None and v[1].aval.shape):
            rows |= {v for v in outs if v not in beside}
    return False


def _straight(
    jaxpr: Jaxpr, given: Mapping[Var, _CallVar | None], prefix: str
) -> tuple[list[_EqnValues], list[_CallVar | None]]:
    """(each equation with the values that it reads and makes, the results), without calls. A literal is None.

    given: variable of the jaxpr's inputs -> its value.
    """
    known, steps = dict(given), list[_EqnValues]()

    def value(v: Var) -> _CallVar | None:
        return None if is_literal(v) else known.get(v, (prefix, v))

    for i, eqn in enumerate(jaxpr.eqns):
        ins = [value(v) for v in eqn.invars]
        if inlined(eqn):
            inner, _ = inner_jaxpr(eqn)
            inside, made = _straight(inner, dict(zip(inner.invars, ins, strict=True)), f"{prefix}{i}.")
            steps += inside
            known.update(zip(eqn.outvars, made, strict=True))
        else:
            steps.append((eqn, ins, [(prefix, v) for v in eqn.outvars]))
    return steps, [value(v) for v in jaxpr.outvars]


def _loops(jaxpr: Jaxpr, trip_count: int, prefix: str) -> Iterator[tuple[str, Eqn]]:
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "scan":
            if eqn.params["length"] == trip_count and _holds(eqn.params["jaxpr"].jaxpr.eqns, _HEAVY):
                yield f"{prefix}{i}", eqn
        elif inlined(eqn):
            yield from _loops(inner_jaxpr(eqn)[0], trip_count, f"{prefix}{i}.")


def _blocks(jaxpr: Jaxpr, prefix: str, marked: bool) -> Iterator[Block]:
    eqns = jaxpr.eqns
    for i, eqn in enumerate(eqns):
        name = eqn.primitive.name
        if name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            if eqn.params["length"] > 1 and _holds(body.eqns, _HEAVY) and not _holds(body.eqns, _REMAT):
                yield Block(prefix=f"{prefix}{i}.", start=0, stop=len(body.eqns))
        elif inlined(eqn) and name not in _REMAT:
            yield from _blocks(inner_jaxpr(eqn)[0], f"{prefix}{i}.", marked)
    yield from (Block(prefix=prefix, start=a, stop=b) for a, b in _runs(jaxpr, marked))


def _holds(eqns: Sequence[Eqn], names: frozenset[str]) -> bool:
    for eqn in eqns:
        if eqn.primitive.name in names:
            return True
        if eqn.primitive.name in INLINED and _holds(inner_jaxpr(eqn)[0].eqns, names):
            return True
        if eqn.primitive.name == "scan" and _holds(eqn.params["jaxpr"].jaxpr.eqns, names):
            return True
    return False


def _runs(jaxpr: Jaxpr, marked: bool) -> list[tuple[int, int]]:
    """The longest sequence of equal runs of equations, as (start, stop) of each run."""
    eqns = jaxpr.eqns
    runs = equal_runs(
        [_token(e) for e in eqns], lambda a, b: _holds(eqns[a:b], _HEAVY), lambda: _crossing(jaxpr)
    )
    apart = {"scan"} if marked else _REMAT | {"scan"}
    return [] if runs and _holds(eqns[slice(*runs[0])], frozenset(apart)) else runs


def _token(eqn: Eqn) -> object:
    shapes = tuple((str(v.aval.dtype), v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, shapes


def _crossing(jaxpr: Jaxpr) -> np.ndarray:
    """The bytes made before equation i and used from there on, as int64 [equations + 1]."""
    made: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update({v: i for v in eqn.invars if not is_literal(v)})
        made.update({v: i for v in eqn.outvars})
    n = len(jaxpr.eqns)
    last.update({v: n for v in jaxpr.outvars if not is_literal(v)})

    def nbytes(v: Var) -> int:
        return int(np.prod(v.aval.shape, dtype=float)) * getattr(v.aval.dtype, "itemsize", 4)

    return crossing(made, last, nbytes, n)


@once
def micro(traced: TracedJax, micro_batches: int) -> TracedJax:
    """The model traced on one micro-batch, 1/micro_batches of the batch.

    Inputs are cut along their first dim, if that is the batch (the first dim that most inputs have). Raises PaseError
    if the batch cannot be divided, and NotInParts if the model cannot be traced on a micro-batch, because its code or
    its state contains the batch's size, or if a micro-batch cannot draw its part of the batch's random numbers.
    """
    if micro_batches == 1:
        return traced
    size = batch_size(traced)
    if size % micro_batches:
        raise PaseError(
            f"a batch of {size} cannot be divided into {micro_batches} micro-batches",
            where=traced.graph.name,
            fix="use a number of micro-batches that divides the batch",
        )
    try:
        made = on_batch(traced, size // micro_batches)
    except PaseError as e:
        raise NotInParts(f"'{traced.graph.name}' cannot run on parts of a batch of {size}: {e}") from e
    paths, cut = (*traced.param_paths, *traced.input_paths), batch_inputs(traced)
    differing = cut | {paths[i] for i in traced.carried}
    return replace(made, drawn=draws_of_batch(traced, made, differing, cut))


def on_batch(traced: TracedJax, examples: int) -> TracedJax:
    """The model traced on a batch of this size. Raises PaseError if it was not traced from a function."""
    import jax

    if traced.fn is None:
        raise PaseError(
            f"'{traced.graph.name}' was not traced from a function, so it cannot be traced on a part of a batch",
            fix="compile the function itself",
        )
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.jaxpr.in_avals]
    n = len(traced.param_paths)
    size = batch_size(traced)
    part = [
        jax.ShapeDtypeStruct((examples, *a.shape[1:]), a.dtype) if split else a
        for a, split in zip(avals[n:], split_inputs(traced), strict=True)
    ]
    params, *batch = combine(jax.tree.unflatten(traced.in_tree, [*avals[:n], *part]), traced.kept)
    made = trace(
        traced.fn,
        params,
        *batch,
        name=traced.graph.name,
        unknown=traced.unknown,
        mode=traced.mode,
        carry=traced.carry,
        dims=traced.trip_counts,
        chances=traced.chances,
    )
    made = replace(made, modules=traced.modules)
    if not traced.padding:
        return made
    cut = dict(zip(traced.input_paths, split_inputs(traced), strict=True))
    given = {p: (s[0] * examples // size, *s[1:]) if cut.get(p) else s for p, s in traced.unpadded.items()}
    return replace(made, padding=traced.padding, unpadded=given)


def split_inputs(traced: TracedJax) -> list[bool]:
    """For each leaf of the batch, whether its first dim is the batch. State that steps pass on has no batch dim."""
    n, size = len(traced.param_paths), batch_size(traced)
    return [
        bool(a.shape) and a.shape[0] == size and n + i not in traced.held
        for i, a in enumerate(traced.jaxpr.in_avals[n:])
    ]


def batch_size(traced: TracedJax) -> int:
    """The first dim that most inputs have; of several, that of the first input. Raw keys do not count.

    Raises PaseError if no input has dims, or if the batch is padded.
    """
    n = len(traced.param_paths)
    given = [a for i, a in enumerate(traced.jaxpr.in_avals) if i >= n and i not in traced.held and a.shape]
    shapes = [a.shape for a in given if not _may_be_key(a)] or [a.shape for a in given]
    if not shapes:
        raise PaseError(
            "it has no batch, because all of its inputs are scalars", where=f"'{traced.graph.name}'"
        )
    size = int(Counter(s[0] for s in shapes).most_common(1)[0][0])
    for path, a in zip(traced.input_paths, traced.jaxpr.in_avals[n:], strict=True):
        if (own := traced.unpadded.get(path)) is not None and a.shape[0] == size != own[0]:
            raise PaseError(
                f"a batch of {own[0]}, padded to {size} (uneven='padded'), cannot be divided into micro-batches",
                fix="choose a batch that needs no padding, or no micro-batches",
            )
    return size


def _may_be_key(a: Aval) -> bool:
    """Whether it has the form of a raw key: two numbers of threefry, four of rbg."""
    return a.shape in ((2,), (4,)) and a.dtype == np.uint32


def batch_inputs(traced: TracedJax) -> frozenset[str]:
    """The paths of the inputs that have the batch's dim."""
    try:
        cut = split_inputs(traced)
    except PaseError:
        return frozenset()  # there is no batch; dividing it raises the error
    return frozenset(path for path, on in zip(traced.input_paths, cut, strict=True) if on)


def check_totals(part: TracedJax, graph: Graph, sums: BatchSums, k: int) -> None:
    """Raises NotInParts if a total is not a value of the program itself, but of a loop, a branch or a function with its
    own derivative, or if a result beside the loss depends on one that the loss reads."""
    here = _own_values(part, part.jaxpr.jaxpr, "")
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    for t in (*sums.totals, *sums.scaled):
        if t not in here:
            op = makers[t]
            raise NotInParts(
                f"a step in {k} micro-batches would give other numbers: {op.name} at {op.source or 'an unknown line'} "
                f"is a sum over the batch inside of a loop, a branch or a function with its own derivative",
                fix=OUTSIDE,
            )
    read = depends_on(part.graph, {*sums.totals, *sums.scaled})
    for path, out in zip(_result_paths(part), part.out_names[1:], strict=True):
        if out is not None and out in read and out not in sums.totals:
            raise NotInParts(
                f"a step in {k} micro-batches would give other numbers: {path} is returned beside the loss and depends "
                f"on a sum over the batch that the loss reads, so each micro-batch would return a share of it",
                fix="return what it is computed from, and compute it of what the micro-batches return",
            )


def _own_values(traced: TracedJax, jaxpr: Jaxpr, prefix: str) -> set[str]:
    """The tensors of equations of the program itself, calls included."""
    found = set[str]()
    for i, eqn in enumerate(jaxpr.eqns):
        found.update(traced.results.get(Place(f"{prefix}{i}"), ()))
        if inlined(eqn):
            found |= _own_values(traced, inner_jaxpr(eqn)[0], f"{prefix}{i}.")
    return found


def _result_paths(traced: TracedJax) -> list[str]:
    """The name of each result beside the loss, as in errors."""
    import jax

    out = jax.tree.unflatten(traced.out_tree, range(len(traced.out_names)))
    paths = jax.tree_util.tree_flatten_with_path(out)[0]
    return [f"the result {jax.tree_util.keystr(keys)}" for keys, _ in paths[1:]]


def check_handed_on(whole: TracedJax, k: int) -> None:
    """Raises NotInParts if an argument without a batch dim is also returned beside the loss, but not named in
    ``carry``.

    Such an argument is state, for example batch statistics. Each micro-batch would then start from the state before the
    step rather than from that of the micro-batch before it.
    """
    if whole.mode != "train" or whole.out_tree is None:
        return
    avals, first, split = whole.jaxpr.in_avals, len(whole.param_paths), split_inputs(whole)
    returned = list(_subtrees(whole.out_tree, whole.jaxpr.out_avals, 0))
    for number, form in enumerate(whole.in_tree.children()[1:]):
        leaves = range(first, first + form.num_leaves)
        first += form.num_leaves
        cut = [split[i - len(whole.param_paths)] for i in leaves]
        if form.num_nodes == 1 or all(cut) or any(i in whole.held for i in leaves):
            continue
        mine = [(avals[i].shape, avals[i].dtype) for i in leaves]
        if (form, mine) in returned:
            raise NotInParts(
                f"a step in {k} micro-batches would give other numbers: argument {number} of the batch comes back "
                f"beside the loss, and each micro-batch would begin with the step's",
                fix=f"declare it as state with carry={{{number}: place}}, for example "
                f"carry={{{number}: (1, 'batch_stats')}}",
            )


def _subtrees(
    form: PyTreeDef, avals: Sequence[Aval], at: int
) -> Iterator[tuple[PyTreeDef, list[tuple[object, object]]]]:
    """Yields every subtree of a result: its treedef, and the shape and dtype of its leaves."""
    yield form, [(a.shape, a.dtype) for a in avals[at : at + form.num_leaves]]
    for child in form.children():
        yield from _subtrees(child, avals, at)
        at += child.num_leaves


BLOCKS.add(
    "jax",
    BlockWays(
        blocks_of=blocks_of,
        micro=micro,
        on_batch=on_batch,
        batch_size=batch_size,
        batch_inputs=batch_inputs,
        check_micro=check_handed_on,
        check_sums=check_totals,
        one_loop=one_loop,
        state_of_whole=False,
        sums_of_loops=True,
        hoists=True,
    ),
)
