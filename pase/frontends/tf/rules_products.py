"""Rules for TensorFlow's products: matrix products and einsum."""

from __future__ import annotations

from collections.abc import Sequence

from pase.frontends.common.products import NamedDims, einsum, product
from pase.frontends.common.values import Value
from pase.frontends.tf.rules import lowers
from pase.frontends.tf.values import TfCall, TfResult, whole
from pase.ops import nests

__all__ = ["matmul", "merged"]


@lowers("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(c: TfCall) -> Sequence[TfResult]:
    """A matrix product over the last two dims. The dims before them are batch dims, which broadcast."""
    batched = c.node.op != "MatMul"
    adjoint = (
        (c.flag("adj_x"), c.flag("adj_y")) if batched else (c.flag("transpose_a"), c.flag("transpose_b"))
    )
    if not batched:
        c.rank(0, 2), c.rank(1, 2)
    if len(c.shape_of(0)) < 2 or len(c.shape_of(1)) < 2:
        raise c.fail(f"it needs matrices, but got shapes {c.shape_of(0)} and {c.shape_of(1)}")
    return [matmul(c, *adjoint, dtype=c.type("Tout", "T"))]


def matmul(c: TfCall, adj_x: bool, adj_y: bool, dtype: str) -> Value:
    """The product of operands 0 and 1. Dims that a reshape of an operand has merged stay separate if possible."""
    sx, sy = c.shape_of(0), c.shape_of(1)
    kx, ky = len(sx) - (2 if adj_x else 1), len(sy) - (1 if adj_y else 2)
    if sx[kx] != sy[ky]:
        raise c.fail(f"shapes {sx} and {sy} cannot be multiplied")
    lead = c.broadcast(*[sx[:-2], sy[:-2]])
    letters = [f"b{i}" for i in range(len(lead))]

    def names(shape: tuple[int, ...], contracted: int, free: str) -> list[str]:
        own = len(shape) - 2
        wide = lead[len(lead) - own :]
        batch = [
            n if s == w else "" for n, s, w in zip(letters[len(lead) - own :], shape, wide, strict=False)
        ]
        return [*batch, *(["k", free] if contracted == own else [free, "k"])]

    of_x, of_y, out = names(sx, kx, "m"), names(sy, ky, "n"), [*letters, "m", "n"]
    shape = (*lead, sx[len(sx) * 2 - 3 - kx], sy[len(sy) * 2 - 3 - ky])
    apart = _apart(c, of_x, of_y)
    if apart is None:
        return product(c, (whole(c.v(0)), of_x), (whole(c.v(1)), of_y), out, dtype, c.node.op)
    x, y, inside = apart
    made = product(c, x, y, [p for n in out for p in inside.get(n, [n])], dtype, c.node.op)
    return c.reshape(made, shape)


def _apart(
    c: TfCall, of_x: list[str], of_y: list[str]
) -> tuple[NamedDims, NamedDims, dict[str, list[str]]] | None:
    """Both operands before the reshapes that merged their dims, with names for their dims.

    Also returns name of a merged dim -> names of the dims that it merges. None if there is no such reshape, or if the
    two operands do not agree on how a dim was merged.
    """
    inside: dict[str, list[str]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    found: list[NamedDims] = []
    for i, names in ((0, of_x), (1, of_y)):
        v = c.v(i)
        parts = merged(v)
        x = whole(v) if parts is None else v.note[1]
        groups = parts if parts is not None else [(k,) for k in range(len(names))]
        dims = [""] * len(x.shape)
        for name, group in zip(names, groups, strict=True):
            own = tuple(x.shape[k] for k in group)
            if name and sizes.setdefault(name, own) != own:
                return None
            inside[name] = [f"{name}.{k}" for k in range(len(group))] if len(group) != 1 else [name]
            for k, part in zip(group, inside[name] if name else [""] * len(group), strict=True):
                dims[k] = part
        found.append((x, dims))
    if not any(c.v(i).note[:1] == ("view",) for i in (0, 1)):
        return None
    return found[0], found[1], inside


def merged(v: Value) -> list[tuple[int, ...]] | None:
    """For each dim of a reshape, the dims that it merges; None if the value is no reshape that only merges dims."""
    factors = nests.common_factors(v.note[1].shape, v.shape) if v.note[:1] == ("view",) else None
    if factors is None:
        return None
    _, of_source, of_shape = factors
    if any(len(f) != 1 for f in of_source):
        return None
    dim_of = {f[0]: i for i, f in enumerate(of_source)}
    return [tuple(dim_of[f] for f in fs) for fs in of_shape]


@lowers("Einsum")
def _einsum(c: TfCall) -> Sequence[TfResult]:
    return [einsum(c, c.text("equation"), [c.v(i) for i in range(len(c.ins))], c.type("T"), "Einsum")]
