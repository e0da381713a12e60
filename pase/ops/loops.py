"""What a loop's body reads and makes: whole tensors prepared before it, a slice per iteration, stacked results."""

from __future__ import annotations

from pase.ir import AccessMap, Scope, Size, Tensor, Walk
from pase.ir.functions import UNSTACK
from pase.ir.parameters import StackRow
from pase.ir.sizes import is_one
from pase.ops.builder import Computes, GraphBuilder, Read, Write, parallel_dims, plain_map

__all__ = ["body_flops", "loop_copy", "stack", "unstack"]


def body_flops(b: GraphBuilder, first: int = 0, scope: Scope | None = None) -> float:
    """The FLOPs of all nodes of b, or of one scope from node ``first`` on. All sizes must be numbers."""
    total = 0.0
    for node in b.nodes[first:]:
        for op in node.ops:
            if scope is not None and scope not in op.scope:
                continue
            points = float(op.times) * op.chance  # type: ignore[arg-type]
            for d in op.worked:
                points *= float(node.space[d].size)  # type: ignore[arg-type]
            total += op.flops_per_point * points
    return total


def loop_copy(b: GraphBuilder, x: Tensor, name: str) -> Tensor:
    """A copy before the loop, so that x is resharded only once to the layout of its readers inside the loop."""
    dims, m = parallel_dims(x.shape), plain_map(x.shape)
    return b.nest(name, "copy", [Read(x, m)], [Write(x.shape, x.dtype, m)], dims, flops=0)[0]


def unstack(b: GraphBuilder, x: Tensor, reverse: bool = False) -> Tensor:
    """One iteration's slice of a stacked tensor. The stacking dim may not be split. reverse: the loop begins at the
    last slice."""
    dims, m = parallel_dims(x.shape), plain_map(x.shape)
    if "d0" in dims:
        dims["d0"] = (x.shape[0], "replicated")
    write = Write(x.shape[1:], x.dtype, AccessMap(m.walks[1:]))
    read, over = Read(x, m, sparse=True), write.map.dims
    computes = Computes(function=UNSTACK, parameters=StackRow(reverse=True) if reverse else None)
    return b.nest("unstack", "view", [read], [write], dims, computes, flops=0, over=over)[0]


def stack(b: GraphBuilder, x: Tensor, length: Size, shape: tuple[Size, ...], reverse: bool = False) -> Tensor:
    """The stacked results of all iterations: shape = (length, *x.shape). reverse: those of the first one come last."""
    dims, m = parallel_dims(x.shape), plain_map(x.shape)
    if not is_one(length):
        dims["l"] = (length, "replicated")
    write = Write(shape, x.dtype, AccessMap((Walk(() if is_one(length) else ("l",)), *m.walks)), sparse=True)
    computes = Computes(parameters=StackRow(reverse=True) if reverse else None)
    return b.nest("stack", "view", [Read(x, m)], [write], dims, computes, flops=0, over=m.dims)[0]
