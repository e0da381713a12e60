"""Reasons to doubt a plan: figures that contradict each other, and work that is not priced by its own op's rule.

Each check compares two figures that are computed independently of each other. A correct plan passes all of them. With
``--strict``, a remark that is ``Remark.doubtful`` makes a command exit with status 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pase.files.quantities import bytes_text
from pase.ir import Graph, Node, Op, Remark
from pase.ir.blocks import micro_batches_of
from pase.ir.sizes import is_one
from pase.machine import GroupedMachine, Machine
from pase.memory.residuals import written_bytes
from pase.plan.types import PlanData
from pase.tables.layouts import concrete_size
from pase.tables.work import parameter_reads

__all__ = ["of_graph", "remarked"]

_ROUNDING = 1e-6
_MUCH = 0.05
"""The part of a device's memory from which on a difference is worth a remark."""


def remarked(plan: PlanData, graph: Graph, machine: Machine) -> PlanData:
    """Return the plan with its remarks: those of the graph that it splits, and the contradictions in its figures."""
    doubts = [*_activations(plan, graph), *_step(plan, machine), *_unsent(plan, graph)]
    return replace(plan, noted=(*of_graph(graph), *doubts, *_short_state(plan)))


def of_graph(graph: Graph) -> tuple[Remark, ...]:
    """Return the remarks that the graph alone gives, however it is split."""
    return tuple(dict.fromkeys((*graph.remarks, *_empty(graph), *_opaque(graph))))


def _empty(graph: Graph) -> Iterator[Remark]:
    if not graph.parameters:
        yield Remark(
            "empty",
            "the model has no parameters: what it multiplies with is an input or a constant of the program",
        )
    if not any(op.flops_per_point for n in graph.nodes for op in n.ops):
        yield Remark("empty", "no op of the model computes anything: every FLOP count is zero")


def _short_state(plan: PlanData) -> Iterator[Remark]:
    """Yield what mixed precision would take beside a model that is stored in 16 bits, where it is much: people mean
    mixed precision by it."""
    held = {path: t.local_bytes(plan.mesh) for path, t in plan.trained.items()}
    short = sum(n for path, n in held.items() if plan.trained[path].dtype in ("bfloat16", "float16"))
    if not short or not plan.memory.optimizer:
        return
    more = 2 * short + plan.memory.optimizer * short / sum(held.values())
    if more > _MUCH * plan.memory_there:
        yield Remark(
            "assumed",
            f"parameters and the optimizer's state are stored in 16 bits, as the model has them: with a float32 copy "
            f"of each parameter and state in float32 (mixed precision), a device would hold {bytes_text(more)} more",
        )


def _opaque(graph: Graph) -> Iterator[Remark]:
    """Yield a remark for each kind of op that no strategy splits, unless the frontend has made one."""
    said = {r.where for r in graph.remarks if r.kind in ("opaque", "unknown", "trip_count")}
    found: dict[tuple[str, float], list[str]] = {}
    for n in graph.nodes:
        for op in n.ops:
            if op.kind != "opaque" or _can_be_split(n, op) or not _has_data(graph, op):
                continue
            if str(op.source.from_root()) not in said:
                kind = op.name, op.flops_per_point * _points(n, op.worked)
                found.setdefault(kind, []).append(str(op.source.from_root()))
    for (name, flops), where in found.items():
        work = (
            f"all of its {flops:.3g} FLOPs" if flops else "all of it, and only its memory traffic is priced"
        )
        calls = "" if len(where) == 1 else f" (the first of {len(where)} such calls)"
        yield Remark("opaque", f"'{name}' is not split: every device does {work}{calls}", where[0])


def _can_be_split(n: Node, op: Op) -> bool:
    """Whether the op has a dim, such as a batch of matrices or of transforms, along which it can be split."""
    dims = (n.space[d] for d in op.dims)
    return any(d.kind != "replicated" and concrete_size(d.size, n.name) > 1 for d in dims)


def _has_data(graph: Graph, op: Op) -> bool:
    """Whether the op reads or makes more than single numbers and constants."""
    tensors = [graph.tensors[a.tensor] for a in (*op.reads, *op.writes)]
    return any(t.role != "constant" and not all(map(is_one, t.shape)) for t in tensors)


def _points(n: Node, dims: Iterable[str]) -> int:
    return math.prod(concrete_size(n.space[d].size, n.name) for d in dims)


def _activations(plan: PlanData, graph: Graph) -> Iterator[Remark]:
    if plan.pipeline is None and plan.memory.activations > (
        most := micro_batches_of(graph) * written_bytes(graph)
    ):
        kept, most_text = bytes_text(plan.memory.activations), bytes_text(most)
        said = f"a device is predicted to keep {kept} of activations, but forward writes only {most_text}"
        yield Remark("activations", f"{said}: please report this")


_CACHED = 1 << 27
"""Bytes that may stay in a device's caches between two steps."""


def _step(plan: PlanData, machine: Machine) -> Iterator[Remark]:
    if plan.unit != "s" or isinstance(machine, GroupedMachine):
        return
    least = {}
    if plan.work is not None:
        what = f"its {plan.work.flops:.3g} FLOPs take on {plan.devices} devices at their peak"
        least[what] = plan.work.at_peak_s / plan.devices
    if plan.memory.optimizer and plan.pipeline is None:
        nbytes = plan.memory.parameters + plan.memory.optimizer
        what = f"an update takes that reads a device's {bytes_text(nbytes)} of parameters and optimizer state"
        least[what] = (nbytes - _CACHED) / machine.device.memory_bandwidth_bytes_per_s
    for what, seconds in least.items():
        if plan.cost < seconds * (1 - _ROUNDING):
            step = f"the predicted step of {plan.cost:.3g} s is shorter than the {seconds:.3g} s that {what}"
            yield Remark("step", step)


def _unsent(plan: PlanData, graph: Graph) -> Iterator[Remark]:
    """Yield a remark if nothing is sent although a device has only a part of some sum."""
    if plan.collectives or plan.pipeline is not None or plan.mesh.devices == 1:
        return
    for n in graph.nodes:
        split = {d for d in plan.strategy[n.name] if n.space[d].kind in ("parallel", "reduction")}
        for op, what in _partial(graph, n, split):
            sum_of = (
                f"nothing is sent, although each device has only a part of the sum that is {what} at {n.name}"
            )
            yield Remark("communication", sum_of, str(op.source.from_root()))
            return


def _partial(graph: Graph, n: Node, split: set[str]) -> Iterator[tuple[Op, str]]:
    """Yield the ops of a node whose result, or whose parameter's gradient, is a sum over split dims."""
    for op in n.ops:
        kept = {d for w in op.writes for d in w.map.dims}
        if op.writes and split & set(op.worked) - kept:
            yield op, "its result"
    for ops, a, t in parameter_reads(graph, n):
        for op in ops:
            if t.needs_grad and op.differentiable and split & set(op.dims) - set(a.map.dims):
                yield op, "the gradient of a parameter"
