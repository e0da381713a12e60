"""A local program whose devices have only some rows of stacks: that of a stage which has only its own layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from pase.local.lower import between
from pase.local.types import LocalOp, LocalOperand, LocalProgram, LocalResult, LocalTransfer
from pase.tables.axis_layout import AxisLayout

__all__ = ["with_rows"]

T = TypeVar("T", LocalOperand, LocalResult)


def with_rows(program: LocalProgram, rows: Mapping[str, int]) -> LocalProgram:
    """The program in which these tensors have fewer rows (elements of their first dim), which no axis splits.

    rows: tensor -> its number of rows. A copy has the rows of the tensor that it is a copy of.
    """
    if not rows:
        return program

    def cut(x: T) -> T:
        many = rows.get(program.original(x.tensor))
        if many is None:
            return x
        return replace(
            x, shape=(many, *x.shape[1:]), layout=_unsplit(x.layout), gradient=_unsplit(x.gradient)
        )

    def op(o: LocalOp) -> LocalOp:
        return replace(o, operands=tuple(map(cut, o.operands)), results=tuple(map(cut, o.results)))

    made = replace(program, ops=tuple(map(op, program.ops)))

    def transfer(k: int, t: LocalTransfer) -> LocalTransfer:
        steps = (*t.forward, *(t.backward or ()))
        if program.original(t.tensor) not in rows or all(
            _unsplit(s.before) == s.before and _unsplit(s.after) == s.after for s in steps
        ):
            return t
        r = made.result(t.tensor)
        read = next(o for op in made.readers[k] for o in op.operands if o.transfer == k)
        back = None if t.backward is None else between(read.gradient, r.gradient, made.mesh)
        return replace(t, forward=between(r.layout, read.layout, made.mesh), backward=back)

    return replace(made, transfers=tuple(transfer(k, t) for k, t in enumerate(made.transfers)))


def _unsplit(layout: AxisLayout) -> AxisLayout:
    """The layout in which no axis splits the first dim."""
    return layout.renumbered(lambda dim: None if dim == 0 else dim)
