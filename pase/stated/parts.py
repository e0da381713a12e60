"""A stage's work in parts: what comes before the repeated block, one block, and what comes after the blocks.

Each part has the device's seconds in forward and backward, what it sends between products, and the bytes of its
weights. These are the graph's own work and collectives (``pase.tables``), priced by the cost model and summed by part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pase.baselines import Baseline, roles
from pase.compiler.stages.costs import CostKind, PartCost, products_of_weights, work_shares
from pase.compiler.stages.places import Places
from pase.ir import Access, Graph, Node, Op
from pase.ir.blocks import Block, holders
from pase.ir.precision import FP8, operand_bytes
from pase.ir.types import LEAF, PRODUCTS
from pase.machine import CollectiveKind, CostModel
from pase.memory.residuals import kept
from pase.plan.error_bar import StepPart, work_kind
from pase.plan.step import launches, saved_by_kernels
from pase.stated.experts import parts_places, sent_to_experts
from pase.stated.kernels import priced_work
from pase.stated.place import SECOND, numbers_heads
from pase.stated.program import Program
from pase.stated.strategy import PRODUCTS_IN, Strategy
from pase.tables.itemize import Collective, collectives
from pase.tables.layouts import concrete_size, dim_index, shards
from pase.tables.work import Phase, Work

__all__ = ["Part", "Parts", "Sent", "parts_of"]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective between products. nbytes: of one call, as in CostModel.collective. seconds: of all calls."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    nbytes: float
    times: float
    seconds: float
    backward: bool
    recompute_runs: float
    """The fraction of the collective that recomputation repeats."""
    beside_s: float = 0.0
    """The seconds of the products that read what it gathers or make what it scatters, without those of weights'
    gradients: it may run during them."""


@dataclass(kw_only=True, eq=False)
class Part(PartCost):
    """A part's compute and bytes, and what the price of the program's own way to run it needs besides.

    What it sends is listed call by call in ``sent``, and its parameters in ``arrays``, because programs overlap and
    join them in their own ways. So its costs of what is sent or kept through the step are zero.

    once_s: work of a step's first micro-batch alone.
    host_s: the host's launches, in forward and backward.
    elements: parameters on the device, by the axes over which their gradients are summed.
    arrays: the same array by array, in the order of their first use: (axes, elements, number of such arrays).
    largest: elements of the largest array.
    shapes: elements of one weight of each shape: of the experts on the device, those of one.
    saved: bytes that backward needs of one micro-batch without recomputation.
    entry: bytes of the part's input.
    spent: the compute again, with recomputation, by what errors of its price have in common (``pase.plan.error_bar``).
    """

    attention_s: tuple[float, float] = (0.0, 0.0)
    host_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    sent: list[Sent] = field(default_factory=list)
    once_s: float = 0.0
    elements: dict[tuple[str, ...], float] = field(default_factory=dict)
    arrays: list[tuple[tuple[str, ...], float, float]] = field(default_factory=list)
    largest: float = 0.0
    shapes: float = 0.0
    saved: float = 0.0
    entry: float = 0.0
    spent: list[StepPart] = field(default_factory=list)

    @property
    def parameters(self) -> float:
        return sum(self.elements.values())

    @property
    def forward_s(self) -> float:
        return self[CostKind.FORWARD]

    @property
    def backward_s(self) -> float:
        """The seconds of backward without recomputation."""
        return self[CostKind.INPUT] + self[CostKind.WEIGHT]

    @property
    def recompute_s(self) -> float:
        """The seconds of forward work that backward repeats."""
        return self[CostKind.RECOMPUTE]

    @property
    def update_s(self) -> float:
        return self[CostKind.AFTER]

    @property
    def kept(self) -> float:
        """Bytes that backward needs of one micro-batch, with the strategy's recomputation."""
        return self[CostKind.KEPT]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a model.

    tied: parameters of the first part that the last part also reads, so that a last stage has a copy of them.
    blocks: the number of blocks.
    layers_before: the number of layers in the first part.
    logits: elements of the logits on a device.
    """

    first: Part
    block: Part
    last: Part
    tied: Part
    blocks: int
    logits: float
    layers_before: int = 0


def parts_of(
    graph: Graph,
    placed: Baseline,
    s: Strategy,
    program: Program,
    model: CostModel,
    written_out: Sequence[Block] = (),
    exchange: CostModel | None = None,
) -> Parts:
    """Return the parts of a graph whose batch is one micro-batch of all data-parallel ranks.

    written_out: the blocks if no loop runs them; ``block`` is then their mean.
    exchange: prices what sends tokens to experts and back, if another library than that of the other collectives does.
    """
    places = parts_places(graph, written_out)
    made = _PartsInTheMaking(
        graph=graph,
        placed=placed,
        strategy=s,
        program=program,
        model=model,
        exchange=exchange or model,
        places=places,
        written_out=written_out if places.numbers else (),
    )
    for n in graph.nodes:
        made.add_work(n)
    if (found := sent_to_experts(graph, places)) is not None:
        made.add_around_experts(*found)
    made.add_collectives()
    made.add_parameters()
    made.add_kept()
    end = made.logits()
    elements = max((made.on_device(*held) for held in made.holds(end[1])), default=0.0) if end else 0.0
    return Parts(**made.parts, blocks=places.blocks, layers_before=made.layers_before, logits=elements)


_PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class _PartsInTheMaking:
    """A placed graph, and its parts while they are added up."""

    graph: Graph
    placed: Baseline
    strategy: Strategy
    program: Program
    model: CostModel
    exchange: CostModel
    places: Places
    written_out: Sequence[Block]
    parts: dict[str, Part] = field(
        default_factory=lambda: {name: Part() for name in ("first", "block", "last", "tied")}
    )
    product_s: dict[str, list[float]] = field(default_factory=dict)
    """A product's node -> its seconds in forward and in backward, in one run of its part."""
    summed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A parameter's node -> the axes over which its gradient is summed."""

    def runs(self, node: str) -> float:
        """Return how often the node's part runs."""
        return float(self.places.blocks) if self.places.of(node) == "block" else 1.0

    def copies(self, node: str) -> float:
        """Return how many nodes of the graph correspond to one of the part: one per block if blocks are written out."""
        return self.runs(node) if self.written_out else 1.0

    @cached_property
    def products(self) -> Mapping[str, int]:
        """For each product, the number of products that precede it in its block or loop."""
        seen: Counter[object] = Counter()
        out, layer = {}, 0
        for n in self.graph.nodes:
            if n.name in self.before and n.kind == "attention":
                layer += 1
            if n.kind in ("matmul", "conv"):
                of_before = layer if n.name in self.before else 0
                around = (n.main.loops, of_before, *sorted(self.places.numbers.get(n.name, ())))
                out[n.name] = seen[around]
                seen[around] += 1
        return out

    @cached_property
    def handed_on(self) -> Mapping[str, tuple[Node, int, int]]:
        """Tensors that one written-out block makes and that are read after it: (node that makes it, block, last block
        that reads it).

        This goes by equations, because a node may have those of two blocks, and a copy has none.
        """
        held_by, many = holders(self.written_out), len(self.written_out)
        read: dict[str, int] = {}
        out: dict[str, tuple[Node, int, int]] = {}
        for n in reversed(self.graph.nodes):
            after = many if self.places.of(n.name) == "last" else -1
            for op in reversed(n.ops):
                of = [read.get(a.tensor, -1) for a in op.writes]
                found = held_by(op.eqn)
                here = max(of, default=-1) if op.kind == "copy" else found[0] if found else after
                for a in op.reads:
                    read[a.tensor] = max(read.get(a.tensor, -1), here)
                if found and op.kind not in (*LEAF, "copy"):
                    out |= {
                        a.tensor: (n, found[0], r) for a, r in zip(op.writes, of, strict=True) if r > found[0]
                    }
        return out

    @cached_property
    def before(self) -> frozenset[str]:
        """The nodes of layers before the equal blocks, such as those without experts before those with them.

        They make what the first block passes on. An encoder does not: its result is read by all blocks of the decoder.
        """
        sources: dict[str, list[str]] = {}
        for e in self.graph.edges:
            if self.places.of(e.src) == "first":
                sources.setdefault(e.dst, []).append(e.src)
        carries = [
            n.name for n in self.graph.nodes if n.kind == "carry" and self.places.of(n.name) == "block"
        ]
        read_once = [t for ts in sources.values() for t in ts if self.places.numbers.get(t) == {0}]
        waiting = [t for name in carries for t in sources.get(name, ())] if carries else read_once
        found = set[str]()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += sources.get(name, ())
        found = {name for name in found if self.graph.node[name].kind != "parameter"}
        return frozenset(found if any(self.graph.node[t].kind == "attention" for t in found) else ())

    @property
    def layers_before(self) -> int:
        return sum(self.graph.node[name].kind == "attention" for name in self.before)

    def in_layer(self, node: str) -> bool:
        """Whether recomputation may repeat the node."""
        return self.places.of(node) == "block" or node in self.before

    def recompute_part(self, n: Node, heavy: bool) -> float:
        """Return the fraction of a node's forward work that backward repeats."""
        s = self.strategy
        if n.kind in ("parameter", "carry", "copy") or s.remat in (None, "none") or not self.in_layer(n.name):
            return 0.0
        return 1.0 if s.remat == "full" else self.program.selective(self.graph, n, heavy, self.products)

    def on_device(self, n: Node, access: Access) -> float:
        """Return the elements of a tensor on one device, in the layout in which the node accesses it."""
        t = self.graph.tensors[access.tensor]
        config = self.placed.strategy[n.name][None, :]
        ways = shards(config, dim_index(n, access.map.dims), self.placed.mesh)
        return float(concrete_size(t.elements, t.name) / ways[0])

    def reduced_elements(self, n: Node, op: Op, write: Access) -> float:
        """Return the elements of a result on one device, as it is kept.

        If the op leaves partial sums, these are the elements of their sum, in the layout of its readers.
        """
        over = dim_index(n, [d for d in op.dims if d not in write.map.dims])
        config = self.placed.strategy[n.name][None, :]
        if shards(config, over, self.placed.mesh)[0] == 1:
            return self.on_device(n, write)
        readers = [
            (m, a) for m in self.graph.nodes for o in m.ops for a in o.reads if a.tensor == write.tensor
        ]
        return max((self.on_device(m, a) for m, a in readers), default=self.on_device(n, write))

    def pass_s(self, n: Node, access: Access) -> float:
        """Return the seconds of one pass over a tensor on one device, in the layout in which the node accesses it."""
        nbytes = self.on_device(n, access) * self.graph.tensors[access.tensor].itemsize
        return nbytes / self.model.machine.device.moved_bytes_per_s

    def add_work(self, n: Node) -> None:
        """Add the node's work, forward and backward, and its kernels' launches."""
        part, many = self.parts[self.places.of(n.name)], self.runs(n.name)
        cfg = self.placed.strategy[n.name][None, :]
        for_weights = products_of_weights(self.graph, n)
        for w, seconds in priced_work(
            self.graph, n, cfg, self.placed.mesh, self.strategy, self.program, self.model
        ):
            each = w.times * seconds / many
            if w.casts == "weight" and self.program.keeps_cast_weights:
                part.once_s += each
                continue
            part.add(work_shares(w, for_weights, 1), each)
            if w.phase == "update":
                continue
            if n.kind == "matmul":
                self.product_s.setdefault(n.name, [0.0, 0.0])[w.phase == "backward"] += each * many
            again = self.recompute_part(n, w.kind != "memory") if w.phase == "forward" else 0.0
            part.add({CostKind.RECOMPUTE: again}, each)
            part.spent.append(_spent(n, w, each * (1 + again)))
            if w.kind == "attention":
                f, b = part.attention_s
                part.attention_s = (f, b + each) if w.phase == "backward" else (f + each, b)
        if n.kind == "attention":
            self.add_around(n)
        executor, more = self.program.executor, self.experts_apart(n, cfg)
        for i, phase in enumerate(_PHASES):
            kernels = launches(self.graph, n, executor)[phase] / many
            part.host_s[i] += (kernels + more / self.copies(n.name) * (i + 1)) * executor.host_s[i]

    def experts_of(self, n: Node) -> float:
        """Return the number of experts on a device whose weights a parameter's node has; 1 without experts."""
        stored = {a.tensor for op in n.ops for a in op.writes}
        for m in self.graph.nodes:
            for op in m.ops:
                if op.kind == "matmul" and len(op.factors) == 2 and stored & {a.tensor for a in op.reads}:
                    groups = set.intersection(*(set(a.map.dims) for a in (*op.factors, *op.writes)))
                    every = math.prod(concrete_size(m.space[d].size, m.name) for d in groups)
                    config = self.placed.strategy[m.name][None, :]
                    return float(every / shards(config, dim_index(m, tuple(groups)), self.placed.mesh)[0])
        return 1.0

    def experts_apart(self, n: Node, cfg: np.ndarray) -> float:
        """Return how many more products the host launches in forward because each expert of a device has its own.

        Backward has two for each of them.
        """
        op, graph = n.main, self.graph
        if not self.program.experts.apart or op.kind != "matmul" or len(op.factors) != 2:
            return 0.0
        sources = [graph.producer.get(a.tensor) for a in op.factors]
        groups = set.intersection(*(set(a.map.dims) for a in (*op.factors, *op.writes)))
        stored = [m is not None and m.kind == "parameter" for m in sources]
        if sum(stored) != 1:
            return 0.0
        every = math.prod(concrete_size(n.space[d].size, n.name) for d in groups)
        return float(every / shards(cfg, dim_index(n, tuple(groups)), self.placed.mesh)[0]) - 1.0

    def add_around(self, n: Node) -> None:
        """Add what the program does around an attention's kernel."""
        program, around = self.program, self.program.around
        queries = next(op for op in n.ops if op.kind == "attention").reads[0]
        once = self.pass_s(n, queries)
        waits_s = around.waits * program.executor.host_s[0]
        many = self.copies(n.name)
        self.add_light(n, (around.forward * once + waits_s) / many, around.backward * once / many)

    def add_around_experts(self, n: Node, sent: Access) -> None:
        """Add what the program does with the tokens that are sent to experts.

        n, sent: the first product with a weight for each expert, and its operand with the tokens.
        """
        around, once = self.program.experts, self.pass_s(n, sent)
        self.add_light(n, around.forward * once, around.backward * once)

    def add_light(self, n: Node, forward_s: float, backward_s: float) -> None:
        """Add light work of the program itself next to a node, in seconds."""
        part, again = self.parts[self.places.of(n.name)], self.recompute_part(n, False)
        part.add({CostKind.FORWARD: 1.0, CostKind.RECOMPUTE: again}, forward_s)
        part.add({CostKind.INPUT: backward_s})
        seconds = forward_s * (1 + again) + backward_s
        part.spent.append(
            StepPart(kind="light", shape=(n.name,), seconds=seconds, family="the program's own")
        )

    def add_collectives(self) -> None:
        """Add collectives between products. Sums of parameters' gradients are left to ``add_parameters``.

        The program as a whole sorts the tokens of all ranks by expert. A rank of data parallelism sorts its own, so
        blocks move nothing of what is sorted between ranks, except rows to their experts and back.
        """
        graph, r = self.graph, roles(self.graph)
        sorted_ = {t for n in graph.nodes if r.dims(n, r.rows) for t in n.tensors}
        stored = {a.tensor for n in graph.nodes if n.kind == "parameter" for op in n.ops for a in op.writes}
        mesh = self.placed.mesh
        for c in collectives(graph, mesh, self.placed.strategy, self.model):
            axes = tuple(name for name in c.axes if name != SECOND)
            if not axes:
                continue
            if c.tensor in stored and c.phase == "backward":
                self.summed[graph.producer[c.tensor].name] = axes
                continue
            if self.strategy.heads and numbers_heads(graph, c):
                continue
            at, many = self.places.of(c.node), self.runs(c.node)
            own = at == "block" and c.tensor in sorted_ - stored
            if own and {*axes} <= {"data", "expert"} and c.kind != "all_to_all":
                continue
            cost, nbytes = c.cost, float(c.nbytes)
            exchanged = c.kind == "all_to_all" and "expert" in axes and self.exchange is not self.model
            if (cast := self.cast_bytes(c)) is not None:
                nbytes *= cast / graph.tensors[c.tensor].itemsize
            if exchanged or axes != c.axes or nbytes != c.nbytes:
                by = self.exchange if exchanged else self.model
                cost = c.times * float(by.collective(c.kind, mesh, mesh.bits(axes), nbytes))
            self.parts[at].sent.append(
                Sent(
                    kind=c.kind,
                    axes=axes,
                    nbytes=nbytes,
                    times=c.times / many,
                    seconds=max(cost, c.times * self.program.executor.collective_s) / many,
                    backward=c.phase == "backward",
                    beside_s=self.beside_s(c) / many,
                    recompute_runs=0.0
                    if c.phase == "backward"
                    else self.recompute_part(graph.node[c.node], True),
                )
            )

    def cast_bytes(self, c: Collective) -> float | None:
        """Return the bytes of an element that is gathered as a product casts it; None if it is not cast before."""
        cast = self.program.gathered.get(self.strategy.precision)
        if cast is None or c.kind != "all_gather" or c.axes != ("model",):
            return None
        ops = [op for name in self.products_at(c) for op in self.graph.node[name].ops]
        return cast[c.phase == "backward"] if any(op.product_dtype for op in ops) else None

    def products_at(self, c: Collective) -> list[str]:
        """Return the nodes of the products that read what is gathered, or make what is scattered."""
        makes = (c.kind == "reduce_scatter") == (c.phase == "forward")
        nodes = [c.source if makes else c.node]
        if self.graph.node[nodes[0]].kind == "copy":
            nodes = [e.dst for e in self.graph.edges if e.src == nodes[0]]
        return [name for name in nodes if name in self.product_s]

    def beside_s(self, c: Collective) -> float:
        """Return the seconds of the products of ``products_at``, of which backward has two."""
        backward = c.phase == "backward"
        return sum(self.product_s[name][backward] for name in self.products_at(c)) / (1 + backward)

    def add_parameters(self) -> None:
        """Add the trained parameters, as the elements whose gradients are summed."""
        at = {n.name: i for i, n in enumerate(self.graph.nodes)}
        used = {e.src: at[e.dst] for e in sorted(self.graph.edges, key=lambda e: -at[e.dst])}
        for n in sorted(self.graph.nodes, key=lambda n: used.get(n.name, 0)):
            if n.kind == "parameter" and self.graph.tensors[n.ops[0].writes[0].tensor].needs_grad:
                local = self.on_device(n, n.ops[0].writes[0]) / self.runs(n.name)
                axes, many = self.summed.get(n.name, ()), self.copies(n.name)
                for name in (self.places.of(n.name), *["tied"] * (n.name in self.places.tied)):
                    part = self.parts[name]
                    part.arrays.append((axes, local * many, 1 / many))
                    part.largest = max(part.largest, local * many)
                    part.elements[axes] = part.elements.get(axes, 0.0) + local
                    part.shapes += local / self.experts_of(n)

    def add_kept(self) -> None:
        """Add what backward needs: what a compiler keeps, or what each kernel's own backward reads."""
        graph, program = self.graph, self.program
        makers = {a.tensor: n for n in graph.nodes for op in n.ops for a in op.writes}
        narrow: set[str] = set()
        narrow_bytes = operand_bytes(PRODUCTS_IN[self.strategy.precision] or FP8)
        if program.executor.fused:
            wanted = set(kept(graph, "light", loops_stack=False))
        else:
            by_weights, by_others = _read_by_recompute(graph, program)
            wanted = by_weights | by_others
            # What only products with weights need is kept in the precision in which they read it.
            if self.strategy.precision != "bf16" and program.keeps_fp8:
                narrow = by_weights - by_others
        if program.keeps_chosen:
            wanted |= self.chosen()
        elif program.executor.fused:
            wanted |= self.recompute_from(wanted)
        end = self.logits()
        logits = (
            concrete_size(graph.tensors[end[1].tensor].elements, "logits")
            if end is not None
            else float("inf")
        )
        for t in wanted:
            n = makers.get(t)
            if n is None or n.kind in ("parameter", "input", "constant"):
                continue
            at, tensor = self.places.of(n.name), graph.tensors[t]
            if at == "last" and n.kind != "carry" and concrete_size(tensor.elements, t) >= logits:
                continue  # it is counted as logits
            op, write = n.write_of(t)
            nbytes = (
                self.reduced_elements(n, op, write) * (narrow_bytes if t in narrow else tensor.itemsize)
            ) / self.copies(n.name)
            part = self.parts["block" if n.kind == "carry" else at]
            part.saved += nbytes
            if n.kind == "carry":
                part.entry += nbytes
                part.add({CostKind.KEPT: nbytes})
            else:
                part.add({CostKind.KEPT: nbytes * (1 - self.recompute_part(n, op.kind in PRODUCTS))})
        self.add_entry(wanted)
        if self.strategy.remat == "full":
            self.parts["first"].add({CostKind.KEPT: self.layers_before * self.parts["block"].entry})

    def add_entry(self, wanted: Collection[str]) -> None:
        """Add what a written-out block gets from the previous one. For a loop, its carries are counted instead."""
        part, reruns = self.parts["block"], self.strategy.remat not in (None, "none")
        middle = len(self.written_out) // 2
        for t, (n, made, read) in self.handed_on.items():
            if not made < middle <= read:
                continue
            op, write = n.write_of(t)
            nbytes = self.reduced_elements(n, op, write) * self.graph.tensors[t].itemsize
            part.entry += nbytes
            if t in wanted:
                part.add({CostKind.KEPT: nbytes * self.recompute_part(n, op.kind in PRODUCTS)})
            elif reruns:
                part.add({CostKind.KEPT: nbytes})
                part.saved += nbytes

    def stays(self, n: Node) -> bool:
        """Whether selective recomputation keeps the results of this node's products or attention."""
        inside = n.kind in PRODUCTS and self.in_layer(n.name)
        return self.strategy.remat == "selective" and inside and not self.recompute_part(n, True)

    def chosen(self) -> set[str]:
        """Return the results that selective recomputation keeps."""
        kept_ = [op for n in self.graph.nodes if self.stays(n) for op in n.ops if op.kind in PRODUCTS]
        return {a.tensor for op in kept_ for a in op.writes}

    def recompute_from(self, wanted: Collection[str]) -> set[str]:
        """Return the kept results from which backward recomputes what it needs. wanted: what it needs."""
        makers = {a.tensor: (n, op) for n in self.graph.nodes for op in n.ops for a in op.writes}
        chosen, found = self.chosen(), set[str]()
        seen, left = set[str](), list(wanted if chosen else ())
        while left:
            t = left.pop()
            if t in seen or t not in makers or not self.in_layer(makers[t][0].name):
                continue
            seen.add(t)
            if t in chosen:
                found.add(t)
            elif t not in self.handed_on and makers[t][0].kind not in ("carry", "parameter"):
                left += [a.tensor for a in makers[t][1].reads]
        return found

    def holds(self, result: Access) -> Iterator[tuple[Node, Access]]:
        """Yield the nodes that have this result, with their accesses: the one that makes it, and its readers."""
        for n in self.graph.nodes:
            yield from ((n, a) for op in n.ops for a in (*op.writes, *op.reads) if a.tensor == result.tensor)

    def logits(self) -> tuple[Node, Access] | None:
        """Return the logits, the largest tensor that a product makes after the blocks, with their node."""
        made = [
            (n, a)
            for n in self.graph.nodes
            if self.places.of(n.name) == "last" and n.kind == "matmul"
            for op in n.ops
            if op.kind == "matmul"
            for a in op.writes
        ]
        return max(
            made,
            key=lambda m: concrete_size(self.graph.tensors[m[1].tensor].elements, m[0].name),
            default=None,
        )


def _read_by_recompute(graph: Graph, program: Program) -> tuple[set[str], set[str]]:
    """Return the tensors that backward reads in an executor without fusion: (those of products with weights in the
    blocks, all others). A view counts as the tensor that it views."""
    by_weights: set[str] = set()
    out: set[str] = set()
    views = {
        a.tensor: op.reads[0].tensor
        for n in graph.nodes
        for op in n.ops
        for a in op.writes
        if op.kind in ("view", "copy") and op.reads
    }

    def root(t: str) -> str:
        while t in views:
            t = views[t]
        return t

    for n in graph.nodes:
        for a in saved_by_kernels(graph, n, program.executor):
            out.add(root(a.tensor))
        for op in n.ops:
            if op.kind in ("matmul", "conv"):
                mine = by_weights if op.product_dtype is not None else out
                mine |= {root(a.tensor) for a in op.reads if graph.tensors[a.tensor].needs_grad}
            elif op.kind == "attention":
                out |= {root(a.tensor) for a in (*op.reads, *op.writes)}
            elif op.kind == "carry":
                out |= {a.tensor for a in op.writes}
    return by_weights, out


def _spent(n: Node, w: Work, seconds: float) -> StepPart:
    """Return a node's work, as parts of a step's error."""
    kind = work_kind(w.kind, w.dtype)
    mnk = () if w.mnk is None else tuple(float(np.ravel(size)[0]) for size in w.mnk)
    shape = (mnk, float(np.ravel(w.flops)[0]), float(np.ravel(w.nbytes)[0]))
    return StepPart(kind=kind, shape=shape, seconds=seconds, family=n.kind if kind == "light" else "")
