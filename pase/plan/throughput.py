"""Throughput in common units: model FLOPs, tokens and examples per second and device.

Model FLOPs are those of products, convolutions and attention, forward and backward, counted once. Recomputation in
backward and light ops are not counted. Fused attention counts two products forward and four backward (its kernel
recomputes the scores), and half of that under a causal mask. Attention written out as products counts what is written.
MFU (model FLOPs utilization: Chowdhery et al. 2022, arXiv 2204.02311, appendix B) is the time that these FLOPs take at
the peak rate of each product's precision, divided by the step time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pase.files.quantities import rounded_text
from pase.ir import Graph, Op
from pase.ir.blocks import micro_batches_of
from pase.ir.functions import CAUSAL_ATTENTION
from pase.ir.precision import rate_dtype
from pase.ir.types import PRODUCTS
from pase.machine import Machine
from pase.tables.layouts import concrete_size

__all__ = ["StepWork", "Throughput", "model_flops", "products", "step_work"]

_BACKWARD = 2
"""The gradients of an attention's operands take four products; forward takes two."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step, which does not depend on the strategy.

    flops: model FLOPs.
    at_peak_s: seconds that one device needs for them at the peak rate of their precisions.
    examples: the first dim of the batch, over all micro-batches. None if there is no batch.
    tokens: the number of indices that are looked up in an embedding. If there are several look-ups, those that run most
        often count, and of these the largest; for prefill and decode, this is the number of tokens decoded. None if
        there is no look-up.
    """

    flops: float
    at_peak_s: float
    examples: int | None = None
    tokens: int | None = None

    def at(self, step_s: float, devices: int) -> Throughput:
        """Return the throughput on this number of devices with a step of this many seconds."""
        device_s = step_s * devices
        return Throughput(
            mfu=self.at_peak_s / device_s,
            tflops_per_device=self.flops / device_s / 1e12,
            tokens_per_s_per_device=None if self.tokens is None else self.tokens / device_s,
            examples_per_s_per_device=None if self.examples is None else self.examples / device_s,
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A step's speed on one device.

    mfu: a fraction of 1.
    tflops_per_device: model FLOPs.
    tokens_per_s_per_device, examples_per_s_per_device: None if they are not known for the model.
    """

    mfu: float
    tflops_per_device: float
    tokens_per_s_per_device: float | None
    examples_per_s_per_device: float | None

    def __str__(self) -> str:
        """
        >>> str(Throughput(mfu=0.412, tflops_per_device=407.6, tokens_per_s_per_device=6667.2,
        ...                examples_per_s_per_device=0.8))
        'MFU 41.2% · 408 TFLOP/s a device · 6,670 tokens/s a device'
        """
        parts = [f"MFU {self.mfu:.1%}", f"{rounded_text(self.tflops_per_device)} TFLOP/s a device"]
        rates = (("tokens", self.tokens_per_s_per_device), ("examples", self.examples_per_s_per_device))
        parts += [f"{rounded_text(rate)} {what}/s a device" for what, rate in rates if rate is not None][:1]
        return " · ".join(parts)


def model_flops(graph: Graph) -> Iterator[tuple[str, float]]:
    """Yield (dtype, FLOPs) of every product of a step, forward and backward."""
    return ((dtype, flops) for _, dtype, flops in products(graph))


def products(graph: Graph) -> Iterator[tuple[str, str, float]]:
    """Yield (node, dtype, FLOPs) of every product of a step, forward and backward."""
    for n in graph.nodes:
        for op in n.ops:
            if op.kind not in PRODUCTS:
                continue
            points = 1.0
            for d in op.worked:
                points *= concrete_size(n.space[d].size, n.name)
            flops = op.flops_per_point * points * concrete_size(op.times, n.name) * op.chance
            if op.function is CAUSAL_ATTENTION:
                flops /= 2
            dtype = op.product_dtype or graph.tensors[op.reads[0].tensor].dtype
            # Fused attention that keeps all bits runs on the matrix units, whose peak is that of rounded factors.
            dtype = dtype if op.kind == "attention" else rate_dtype(op, dtype)
            yield n.name, dtype, flops * (1 + _gradients(graph, op))


def _gradients(graph: Graph, op: Op) -> int:
    """Return how many products backward has for one forward product, relative to it."""
    wanted = sum(op.differentiable and graph.tensors[a.tensor].needs_grad for a in op.reads)
    return (_BACKWARD if wanted else 0) if op.kind == "attention" else wanted


def step_work(graph: Graph, machine: Machine) -> StepWork:
    """Return the work of a step of the simplified graph; for a step in micro-batches, the work of all of them."""
    flops = list(model_flops(graph))
    inputs = {n.ops[0].writes[0].tensor: n for n in graph.nodes if n.kind == "input"}
    micro_batches = micro_batches_of(graph)
    batches = [t.shape[0] for name in inputs for t in [graph.tensors[name]] if t.shape]
    looked_up = [
        (concrete_size(op.times, n.name) // micro_batches, found)
        for n in graph.nodes
        for op in n.ops
        if op.kind == "gather" and (found := _indices(graph, op)) is not None
    ]
    most = max(looked_up, default=None)
    tokens = None if most is None else most[0] * most[1]
    return StepWork(
        flops=sum(f for _, f in flops),
        at_peak_s=sum(f / machine.device.peak(dtype) for dtype, f in flops),
        examples=concrete_size(batches[0], "batch") * micro_batches if batches else None,
        tokens=None if tokens is None else tokens * micro_batches,
    )


def _looks_up(graph: Graph, table: str, indices: str) -> bool:
    """Whether the table is a parameter and the indices come from the batch.

    JAX wraps negative indices around before a look-up.
    """
    first = graph.producer.get(table)
    while first is not None and first.kind == "copy":
        first = graph.producer.get(first.ops[0].reads[0].tensor)
    if first is None or first.kind != "parameter":
        return False
    makers, found = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}, False
    for op in _before(makers, indices):
        if op.kind not in ("input", "constant", "copy", "view", "elementwise"):
            return False
        found |= op.kind == "input"
    return found


def _before(makers: Mapping[str, Op], tensor: str) -> Iterator[Op]:
    """Yield the op that makes a tensor, and those that make its operands, each op once. makers: tensor -> its op."""
    left, seen = [tensor], {tensor}
    while left:
        op = makers.get(left.pop())
        if op is not None:
            yield op
            new = dict.fromkeys(a.tensor for a in op.reads if a.tensor not in seen)
            seen.update(new)
            left += new


def _indices(graph: Graph, op: Op) -> int | None:
    """Return the number of rows of a parameter that a look-up fetches by indices from the batch.

    None if the op is no such look-up.
    """
    if len(op.reads) != 2 or not _looks_up(graph, *(a.tensor for a in op.reads)):
        return None
    return int(concrete_size(graph.tensors[op.reads[1].tensor].elements, op.name))
