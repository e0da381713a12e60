"""Compares a plan with the program that XLA compiles: the numbers of one step, and bytes by kind of collective.

The column ``on_cpu`` accounts for three properties of XLA's CPU pipeline, so that the comparison tests the plan and not
the backend. First, it never forms a reduce-scatter. It uses an all-reduce of the whole tensor and a slice instead, and
this all-reduce also replaces reductions that would follow. Second, it does not add up the partial gradients of a
tensor's readers before it reduces them (the GPU and TPU pipelines do). Third, it makes one all-reduce per dim for a
reduction over two split dims (batch and sequence), although one over both would be enough.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.jax.make import modules_of, one_program_plan
from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.pipeline.replicas import in_stages
from pase.backends.jax.spmd.lower import Lowering, lowerings
from pase.backends.jax.spmd.values import NotManual
from pase.hlo.collectives import HloCollective, collectives
from pase.hlo.module import XlaProgram
from pase.ir.whole_step import whole_step
from pase.plan.types import PlanData
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.ir import Access, Edge, Graph, Op
    from pase.tables.itemize import Collective

__all__ = [
    "CollectiveRow",
    "StepResult",
    "compare",
    "sharded_step",
    "unmatched",
    "unsharded_step",
    "worst_difference",
]


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Bytes of one kind of collective: the number of times × the larger local buffer, summed over a step."""

    kind: str
    predicted: int
    on_cpu: int
    compiled: int

    @property
    def error(self) -> float:
        """(on_cpu - compiled) / compiled, or 0 if both are 0."""
        return (self.on_cpu - self.compiled) / self.compiled if self.compiled else float(self.on_cpu > 0)


def compare(plan: PlanData, compiled: XlaProgram, lowering: Lowering = "annotated") -> list[CollectiveRow]:
    """Compare the plan's collectives with those of a compiled step, by kind.

    compiled: the result of ``plan.jax.lower_train_step(optimizer, lowering=…).compile()`` on host devices. lowering:
    the lowering of that step. In the manual lowering, the program has exactly the plan's collectives, so ``on_cpu`` is
    what the plan predicts.
    """
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute")
    predicted = dict.fromkeys(kinds, 0)
    on_cpu = dict.fromkeys(kinds, 0)
    sums = _AllReduceCount.of(plan)
    scattered = {_flow(c) for c in plan.collectives if c.kind == "reduce_scatter"}
    for c in plan.collectives:
        nbytes = c.nbytes * c.times
        predicted[c.kind] += nbytes
        if lowering == "manual":
            on_cpu[c.kind] += nbytes
            continue
        if c.kind == "all_reduce" and _flow(c) in scattered and not sums.sliced_between(c):
            continue  # an all-reduce of the whole tensor over all axes replaced the reduce-scatter
        if c.kind in ("all_reduce", "reduce_scatter"):
            on_cpu["all_reduce"] += nbytes * sums.count(c)
        else:
            on_cpu[c.kind] += nbytes
    found = dict.fromkeys(kinds, 0)
    for h in collectives(compiled):
        found[h.kind] = found.get(h.kind, 0) + h.bytes * (h.count or 1)
    return [
        CollectiveRow(kind=k, predicted=predicted.get(k, 0), on_cpu=on_cpu.get(k, 0), compiled=n)
        for k, n in found.items()
    ]


def unmatched(
    plan: PlanData, compiled: XlaProgram, kinds: Sequence[str]
) -> tuple[list[Collective], list[HloCollective]]:
    """(unmatched collectives of the plan, unmatched collectives of the compiled program).

    Collectives of the same kind, bytes and mesh axes are paired. ``times`` and ``count`` of the returned collectives
    are the numbers without a partner. kinds: any of "all_gather", "all_to_all", "permute". Reductions are formed
    differently on a CPU (see the module's docstring), so all_reduce and reduce_scatter never match completely.
    """
    left: dict[tuple[str, int, int | None], list[HloCollective]] = {}
    for h in collectives(compiled, plan.mesh):
        if h.kind in kinds and h.group_size > 1:
            # XLA combines all-gathers of several tensors; an all-to-all's operands are parts of one tensor.
            for nbytes in (h.bytes,) if h.kind == "all_to_all" else h.parts:
                left.setdefault((h.kind, nbytes, h.axes), []).append(
                    replace(h, bytes=nbytes, parts=(nbytes,))
                )
    alone = []
    for c in plan.collectives:
        if c.kind not in kinds:
            continue
        wanted = c.times
        same = left.get((c.kind, c.nbytes, sum(1 << plan.mesh.names.index(a) for a in c.axes)), [])
        while wanted and same:
            paired = min(wanted, same[0].count)
            wanted -= paired
            if same[0].count == paired:
                same.pop(0)
            else:
                same[0] = replace(same[0], count=same[0].count - paired)
        if wanted:
            alone.append(replace(c, times=wanted))
    return alone, [h for hs in left.values() for h in hs]


def _flow(c: Collective) -> tuple[str, str, str, str]:
    return c.tensor, c.source, c.node, c.phase


@dataclass(frozen=True, kw_only=True)
class _AllReduceCount:
    """Counts the all-reduces that the CPU pipeline makes for one reduction in the plan."""

    plan: PlanData
    graph: Graph
    readers: Mapping[str, Sequence[Edge]]
    """Copy node -> the edges that leave it."""

    @classmethod
    def of(cls, plan: PlanData) -> _AllReduceCount:
        graph = plan.graph
        readers: dict[str, list[Edge]] = {}
        for e in graph.edges:
            if graph.node[e.src].kind == "copy":
                readers.setdefault(e.src, []).append(e)
        return cls(plan=plan, graph=graph, readers=readers)

    def count(self, c: Collective) -> int:
        """The number of all-reduces for a collective of the plan.

        A gradient is reduced once for each reader that sums it, and once for each split dim that is summed over.
        """
        if c.phase == "forward" or whole_step(self.graph):  # a whole step's gradients are what its ops make
            op, access = self.graph.node[c.source].write_of(c.tensor)
            return max(self._dims(c, c.source, op, access), 1)
        reads = [(c.node, c.tensor)]
        if self.graph.node[c.node].kind == "copy":
            reads = [(e.dst, e.tensor) for e in self.readers[c.node]]
        return max(sum(self._read(c, node, tensor) for node, tensor in reads), 1)

    def sliced_between(self, c: Collective) -> bool:
        """Whether this is the remaining reduction of a product whose gradient goes directly into slices.

        If so, XLA first reduces the whole gradient over the slices' axes, and then the slices over the other axes.
        """
        main = self.graph.node[c.node].main
        product = main.kind in ("matmul", "conv") and any(a.tensor == c.tensor for a in main.reads)
        route = self.plan.define.get(c.tensor)
        return product and c.phase == "backward" and route is not None and route.gradient is not None

    def _read(self, c: Collective, node: str, tensor: str) -> int:
        ops = self.graph.node[node].ops
        reads = [(op, a) for op in ops if op.differentiable for a in op.reads if a.tensor == tensor]
        return max((self._dims(c, node, op, a) for op, a in reads), default=0)

    def _dims(self, c: Collective, node: str, op: Op, access: Access) -> int:
        """The number of split dims of the op that the tensor does not have. Each needs a reduction."""
        split = self.plan.strategy[node]
        return sum(bool(set(c.axes) & set(split.get(d, ()))) for d in op.dims if d not in access.map.dims)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The numbers of one train step: loss, gradients and updated parameters. Sharded arrays are gathered."""

    loss: float
    gradients: Tree
    parameters: Tree
    compiled: XlaProgram | None = None
    """The compiled step, for ``compare``."""
    lowering: Lowering = "annotated"
    """How it was lowered, for ``compare``. Never "auto"."""
    rematerialised: tuple[str, ...] = ()
    """XLA's warnings about tensors that it gathered completely because it found no better way to reshard them."""

    def differences(self, other: StepResult) -> dict[str, float]:
        """The differences from another step.

        loss: the relative difference. gradients, parameters: the largest difference of any element, divided by the
        largest element.
        """
        return {
            "loss": abs(self.loss - other.loss) / max(abs(self.loss), 1e-30),
            "gradients": worst_difference(self.gradients, other.gradients),
            "parameters": worst_difference(self.parameters, other.parameters),
        }


def worst_difference(a: Tree, b: Tree) -> float:
    """The largest |a - b| of two pytrees, relative to the largest |a|.

    It is 0 if they are equal (also if both are zero), infinite if only a is zero, and NaN if either contains NaN.

    >>> [worst_difference([1.0, 4.0], b) for b in ([1.0, 3.0], [1.0, 4.0], [1.0, float("nan")])]
    [0.25, 0.0, nan]
    """
    import jax
    import numpy as np

    pairs = [
        (np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    off = np.max([np.abs(x - y).max() for x, y in pairs])  # Python's max may drop a NaN
    with np.errstate(divide="ignore"):
        return float(off / np.max([np.abs(x).max() for x, _ in pairs])) if off else 0.0


def unsharded_step(
    loss_fn: Callable[..., Array], optimizer: GradientTransformation, params: Tree, *batch: Tree
) -> StepResult:
    """The step on one device, without a plan."""
    import jax

    from pase.frontends.jax.leaves import arrays, combine, static, trained, value_and_grad
    from pase.frontends.jax.modules import ModuleFunction, opened

    loss_fn, _, (params, *rest) = opened(loss_fn, "train", None, (params, *batch))
    batch = tuple(rest)
    kept, fixed = _keeping_gradients(optimizer), static((params, *batch))

    def step(params: Tree, *batch: Tree) -> Tree:
        import optax

        (loss, aux), grads = value_and_grad(loss_fn)(*combine((params, *batch), fixed))
        if isinstance(loss_fn, ModuleFunction):
            _, advanced = loss_fn.returned((loss, aux), True)
            params = params if advanced is None else combine(advanced.params, params)
        mine = trained(params)
        updates, (grads, _) = kept.update(grads, kept.init(mine), mine)
        return loss, grads, optax.apply_updates(mine, updates)

    loss, grads, updated = jax.jit(step)(*arrays((params, *batch)))
    return StepResult(loss=float(loss), gradients=grads, parameters=updated)


def sharded_step(
    plan: PlanData,
    optimizer: GradientTransformation,
    params: Tree,
    *batch: Tree,
    lowering: Lowering = "auto",
) -> StepResult:
    """The step by ``plan.jax.train_step`` on the plan's devices. It is compiled once."""
    import jax

    from pase.frontends.jax.leaves import arrays, trained

    params, *rest = _arguments(plan, params, *batch)
    batch = tuple(rest)
    if plan.pipeline is not None:
        return _staged_step(plan, optimizer, params, *batch)
    kept, jp = _keeping_gradients(optimizer), one_program_plan(plan)
    mesh = jp.mesh()
    with _stderr() as said:
        program, way = _lowered_step(jp, kept, mesh, lowering)
        compiled = program.compile()
    placed, *placed_batch = arrays(jp.device_put(params, *batch, mesh=mesh))
    state = jp.init(kept, placed, mesh)
    updated, (grads, _), value = compiled(placed, state, *placed_batch)
    return StepResult(
        loss=float(jax.tree.leaves(value)[0]),
        gradients=jp.unpadded(grads),
        parameters=trained(jp.unpadded(updated)),
        compiled=compiled,
        lowering=way,
        rematerialised=tuple(line for line in said if "Involuntary full rematerialization" in line),
    )


def _arguments(plan: PlanData, *args: Tree) -> tuple[Tree, ...]:
    """The arguments of the plan's program. For a function of modules, they are those of the pure function."""
    modules = modules_of(plan)
    return args if modules is None else modules.open_all(args).arguments


def _lowered_step(
    jp: OneProgramPlan, optimizer: GradientTransformation, mesh: JaxMesh, lowering: Lowering
) -> tuple[Tree, Lowering]:
    """(the lowered step, its lowering). ``compare`` needs the lowering."""
    only = jp.hoisted != "none" and lowering == "auto"  # XLA would send in each micro-batch
    *first, last = ("manual",) if only else lowerings(lowering, mesh)
    for way in first:
        try:
            return jp.lower_train_step(optimizer, mesh, lowering=way), way
        except NotManual as e:
            warnings.warn(e.left, stacklevel=3)
    return jp.lower_train_step(optimizer, mesh, lowering=last), last


def _staged_step(plan: PlanData, optimizer: GradientTransformation, params: Tree, *batch: Tree) -> StepResult:
    """The step of a pipelined plan, which consists of many programs."""
    import jax

    from pase.frontends.jax.leaves import trained

    kept, jp = _keeping_gradients(optimizer), in_stages(plan)
    placed, *placed_batch = jp.device_put(params, *batch)
    state = jp.init(kept, placed)
    updated, state, value = jp.train_step(kept)(placed, state, *placed_batch)
    grads, _ = jp.gathered(state)
    return StepResult(
        loss=float(jax.tree.leaves(value)[0]),
        gradients=grads,
        parameters=jp.gathered(trained(updated)),
    )


def _keeping_gradients(optimizer: GradientTransformation) -> GradientTransformation:
    """The optimizer, with the last gradients stored in its state."""
    import jax
    import optax

    def init(params: Tree) -> Tree:
        return jax.tree.map(jax.numpy.zeros_like, params), optimizer.init(params)

    def update(grads: Tree, state: Tree, params: Tree = None) -> Tree:
        updates, inner = optimizer.update(grads, state[1], params)
        return updates, (grads, inner)

    return optax.GradientTransformation(init, update)


@contextmanager
def _stderr() -> Iterator[list[str]]:
    """The lines that the process, including XLA, writes to standard error. The list is filled when the block ends."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as f:
        os.dup2(f.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            f.seek(0)
            text = f.read().decode(errors="replace")
            lines += text.splitlines()
            sys.stderr.write(text)
