"""Helpers: graphs of models, counts over them, and random graphs and programs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, get_args

import networkx as nx
from hypothesis import strategies as st

from pase import zoo
from pase.frontends.jax.frontend import trace
from pase.ir import (
    Access,
    AccessMap,
    Dim,
    Graph,
    IterationSpace,
    Node,
    Op,
    Tensor,
    Walk,
    Window,
    named,
    parse_size,
    simplify,
    to_text,
    verify,
)
from pase.ir.facts import GraphFacts, Hoisted
from pase.ir.functions import FUNCTIONS
from pase.ir.places import Place, Scope, ScopeKind, SourceLine

HEAVY = {"matmul", "conv", "gather", "scatter", "window", "sequential", "carry"}


@lru_cache(maxsize=64)
def raw(model: str) -> Graph:
    """The raw graph of a reduced zoo model, such as ``gpt2?scan=0``."""
    m = zoo.reduced(model)
    return trace(m.loss_fn, m.params, m.batch, name=model).graph


@lru_cache(maxsize=64)
def simple(model: str) -> Graph:
    return named(simplify(raw(model)))


def at_sizes(name: str, batch: int, seq: int) -> tuple[Any, Any, Any]:
    """The loss, parameters and batch of a reduced zoo model at this size of batch and, if it has one, of sequence."""
    settings = {"batch": batch} | ({"seq": seq} if "seq" in zoo.entry(name).settings else {})
    m = zoo.reduced(name, **settings)
    return m.loss_fn, m.params, m.batch


def graph_of(fn: Any, params: Any, batch: Any) -> Graph:
    return verify(named(simplify(trace(fn, params, batch, name="m").graph)))


def flops(graph: Graph, *kinds: str) -> float:
    """The FLOPs of a forward pass in these kinds of ops (in all ops, if no kind is named)."""
    total = 0.0
    for n in graph.nodes:
        for op in n.ops:
            if not kinds or op.kind in kinds:
                total += op.flops_per_point * op.times * math.prod(n.space[d].size for d in op.worked)  # type: ignore[operator,misc]
    return total


def without_places(text: str) -> str:
    """The graph without equation paths and loop names, which contain numbers of the jaxpr's equations."""
    return re.sub(r" (?:eqn|scope)=\S+", "", text)


def canonical(graph: Graph) -> str:
    """The nodes only, with renumbered tensors and without literals. It is equal for traces that differ in dead or
    constant tensors, or in numbers."""
    lines = without_places(to_text(graph, sources=False)).splitlines()
    lines = [re.sub(r" literals=(\?|\([^)]*\))", "", x).removesuffix(" |") for x in lines]
    text = "\n".join(x for x in lines if x.startswith(("node", "  ")))
    numbers: dict[str, str] = {}
    constant = {t.name for t in graph.tensors.values() if t.role == "constant"}

    def number(m: re.Match[str]) -> str:
        name = m[1]
        return "const[" if name in constant else numbers.setdefault(name, f"T{len(numbers)}") + "["

    return re.sub(r"\b(t\d+c?\d*)\[", number, text)


def without_carries(graph: Graph) -> nx.MultiDiGraph[str]:
    """The nodes and flows, without the flows that close a loop."""
    out: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    out.add_nodes_from(n.name for n in graph.nodes)
    for e in graph.edges:
        closing = graph.node[e.dst].kind == "carry" and e.op is not graph.node[e.dst].ops[0]
        if not closing:
            out.add_edge(e.src, e.dst)
    return out


def ops(graph: Graph) -> Iterator[Op]:
    for n in graph.nodes:
        yield from n.ops


# Random graphs: they are valid for the text form, but are not models.

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
dim_names = st.from_regex(r"[a-z][a-z0-9_]{0,3}", fullmatch=True)
sizes = st.one_of(
    st.integers(1, 10**9),
    st.sampled_from(
        ["b", "2*b", "b*s", "b + 1", "floordiv(b, 2)", "max(b, s)", "b % 7", "b**2 - s", "min(3, b) * 2"]
    ).map(parse_size),
)
windows = st.none() | st.builds(Window, extent=st.integers(1, 11), stride=st.integers(1, 4))


def walks(dims: list[str]) -> st.SearchStrategy[Walk]:
    some = st.lists(st.sampled_from(dims), max_size=3, unique=True).map(tuple) if dims else st.just(())
    return st.builds(Walk, some, windows)


@st.composite
def graphs(draw: Callable[..., Any]) -> Graph:
    dtypes = st.sampled_from(["float32", "bfloat16", "int32", "bool", "key", "float8_e4m3fn"])
    keys = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    tensors = {
        k: Tensor(
            name=k,
            shape=draw(st.lists(sizes, max_size=3).map(tuple)),
            dtype=draw(dtypes),
            role=draw(st.sampled_from(["parameter", "input", "activation", "constant"])),
            path=draw(st.just("") | names),
            needs_grad=draw(st.booleans()),
            copy_of=draw(st.just("") | st.sampled_from(keys)),
        )
        for k in keys
    }
    nodes = []
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dims = draw(st.lists(dim_names, max_size=4, unique=True))
        kinds = st.sampled_from(["parallel", "reduction", "window", "replicated", "pending"])
        space = IterationSpace(tuple(Dim(name=d, size=draw(sizes), kind=draw(kinds)) for d in dims))
        maps = st.builds(AccessMap, st.lists(walks(dims), max_size=3).map(tuple))
        accesses = st.lists(
            st.builds(Access, st.sampled_from(keys), maps, *[st.booleans()] * 3), max_size=3
        ).map(tuple)
        op = st.builds(
            Op,
            name=names,
            function=st.sampled_from(list(FUNCTIONS.values())),
            kind=st.sampled_from(["matmul", "view", "opaque", "carry", "reduce"]),
            reads=accesses,
            writes=accesses,
            flops_per_point=st.floats(0, 1e12, allow_nan=False),
            over=st.none() | st.lists(st.sampled_from(dims), max_size=2, unique=True).map(tuple)
            if dims
            else st.none(),
            differentiable=st.booleans(),
            source=(st.just("") | names).map(SourceLine.parse),
            eqn=(st.just("") | names).map(Place.parse),
            scope=st.lists(st.builds(Scope, st.sampled_from(get_args(ScopeKind)), names), max_size=2).map(
                tuple
            ),
            times=sizes,
            chance=st.sampled_from([1.0, 0.25, 0.001]),
            remat=st.booleans(),
            backward=st.booleans(),
        )
        nodes.append(Node(name=name, space=space, ops=tuple(draw(st.lists(op, max_size=3)))))
    return Graph(
        name=draw(names),
        tensors=tensors,
        nodes=tuple(nodes),
        outputs=tuple(draw(st.lists(st.sampled_from(keys), max_size=2))),
        facts=GraphFacts(
            frontend=draw(st.just("") | names),
            dims=draw(st.dictionaries(names, st.integers(0, 99), max_size=2)),
            precision=draw(st.sampled_from(["", "fp8"])),
            hoisted=draw(st.sampled_from(get_args(Hoisted))),
            micro_batches=draw(st.integers(1, 64)),
            decomposed=draw(st.booleans()),
        ),
    )
