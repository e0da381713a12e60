"""A derivative rule of the user in the graph: its forward, its backward, and the gradients between them.

Neither is differentiated. Backward consists of the rule's own ops. The values that it reads from forward are kept as
the rule's forward returns them.
"""

from __future__ import annotations

from dataclasses import replace

from pase.ir import Tensor
from pase.ops.builder import GraphBuilder, Read, Write, parallel_dims, plain_map

__all__ = ["cotangent", "hand_back"]


def cotangent(b: GraphBuilder, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the value of a rule's forward, now with a gradient, and that gradient, which the rule's backward
    reads."""
    dims, m = parallel_dims(value.shape), plain_map(value.shape)
    writes = [Write(value.shape, value.dtype, m)] * 2
    out, gradient = b.nest("cotangent", "cotangent", [Read(value, m)], writes, dims, flops=0)
    out = b.tensors[out.name] = replace(out, needs_grad=True)
    return out, gradient


def hand_back(b: GraphBuilder, operand: Tensor, gradient: Tensor) -> None:
    """Makes the rule's result the operand's gradient, in the operand's layout."""
    dims, m = parallel_dims(operand.shape), plain_map(operand.shape)
    b.nest("gradient", "gradient", [Read(gradient, m), Read(operand, m, gradient=True)], [], dims, flops=0)
