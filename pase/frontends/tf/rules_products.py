"""Rules for TensorFlow's products: matrix products and einsum."""

from __future__ import annotations

from collections.abc import Sequence

from pase.frontends.tf.rules import broadcast_shape, lowers
from pase.frontends.tf.values import Reshaped, TfCall, TfValue
from pase.ir import Tensor, functions
from pase.ops import nests

__all__ = ["matmul"]


@lowers("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matmul(c: TfCall) -> Sequence[TfValue]:
    """A matrix product over the last two dims. The dims before them are batch dims, which broadcast."""
    batched = c.node.op != "MatMul"
    adjoint = (
        (c.flag("adj_x"), c.flag("adj_y")) if batched else (c.flag("transpose_a"), c.flag("transpose_b"))
    )
    if not batched:
        c.rank(0, 2), c.rank(1, 2)
    if len(c.shape(0)) < 2 or len(c.shape(1)) < 2:
        raise c.fail(f"it needs matrices, but got shapes {c.shape(0)} and {c.shape(1)}")
    return [matmul(c, *adjoint, dtype=c.type("Tout", "T"))]


def matmul(c: TfCall, adj_x: bool, adj_y: bool, dtype: str) -> TfValue:
    """The product of operands 0 and 1. Dims that a reshape of an operand has merged stay separate if possible."""
    sx, sy = c.shape(0), c.shape(1)
    kx, ky = len(sx) - (2 if adj_x else 1), len(sy) - (1 if adj_y else 2)
    if sx[kx] != sy[ky]:
        raise c.fail(f"shapes {sx} and {sy} cannot be multiplied")
    lead = broadcast_shape(c, [sx[:-2], sy[:-2]])
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
        return product_of(c, c.x(0), c.x(1), of_x, of_y, out, dtype)
    (x, of_x), (y, of_y), inside = apart
    made = product_of(c, x, y, of_x, of_y, [p for n in out for p in inside.get(n, [n])], dtype)
    return made if made.shape == shape else Reshaped(source=made, shape=shape, at=c.b.eqn)


def _apart(
    c: TfCall, of_x: list[str], of_y: list[str]
) -> tuple[tuple[Tensor, list[str]], tuple[Tensor, list[str]], dict[str, list[str]]] | None:
    """Both operands before the reshapes that merged their dims, with names for their dims.

    Also returns name of a merged dim -> names of the dims that it merges. None if there is no such reshape, or if the
    two operands do not agree on how a dim was merged.
    """
    inside: dict[str, list[str]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    found: list[tuple[Tensor, list[str]]] = []
    for i, names in ((0, of_x), (1, of_y)):
        v = c.value(i)
        parts = v.parts() if isinstance(v, Reshaped) else None
        x = v.source if isinstance(v, Reshaped) and parts is not None else c.x(i)
        groups = parts if parts is not None else [(k,) for k in range(len(names))]
        dims = [""] * len(x.shape)
        for name, group in zip(names, groups, strict=True):
            own = tuple(int(x.shape[k]) for k in group)  # type: ignore[arg-type]
            if name and sizes.setdefault(name, own) != own:
                return None
            inside[name] = [f"{name}.{k}" for k in range(len(group))] if len(group) != 1 else [name]
            for k, part in zip(group, inside[name] if name else [""] * len(group), strict=True):
                dims[k] = part
        found.append((x, dims))
    if not any(isinstance(c.value(i), Reshaped) for i in (0, 1)):
        return None
    return found[0], found[1], inside


def product_of(
    c: TfCall, x: Tensor, y: Tensor, of_x: Sequence[str], of_y: Sequence[str], out: Sequence[str], dtype: str
) -> Tensor:
    """A product of two tensors with named dims. "" names a dim of one element, which is dropped.

    A name in ``out`` that neither operand has is a dim of one element.
    """
    x, of_x = _without(c, x, of_x)
    y, of_y = _without(c, y, of_y)
    x, of_x = _summed(c, x, of_x, {*of_y, *out})
    y, of_y = _summed(c, y, of_y, {*of_x, *out})
    shared = [n for n in of_x if n in of_y]
    batch = [n for n in shared if n in out]
    over = [n for n in shared if n not in out]
    made = nests.contract(
        c.b,
        x,
        y,
        ([of_x.index(n) for n in over], [of_y.index(n) for n in over]),
        ([of_x.index(n) for n in batch], [of_y.index(n) for n in batch]),
        dtype,
        name=c.node.op,
    )
    order = [*batch, *(n for n in of_x if n not in shared), *(n for n in of_y if n not in shared)]
    kept = [n for n in out if n in order]
    if kept != order:
        made = nests.transpose(c.b, made, [order.index(n) for n in kept])
    if len(kept) != len(out):
        sizes = dict(zip(kept, made.shape, strict=True))
        made = nests.reshape(c.b, made, [sizes.get(n, 1) for n in out])
    return made


def _without(c: TfCall, x: Tensor, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    """x without the dims named "", and the names of its other dims."""
    kept = [n for n in names if n]
    if len(kept) == len(names):
        return x, kept
    return nests.reshape(c.b, x, [s for s, n in zip(x.shape, names, strict=True) if n]), kept


def _summed(c: TfCall, x: Tensor, names: list[str], used: set[str]) -> tuple[Tensor, list[str]]:
    """x, summed over the dims that neither the other operand nor the result has, and the names of its other dims."""
    gone = [i for i, n in enumerate(names) if n not in used]
    if not gone:
        return x, names
    return nests.reduce(c.b, functions.SUM, [x], gone, [x.dtype])[0], [n for n in names if n in used]


@lowers("Einsum")
def _einsum(c: TfCall) -> Sequence[TfValue]:
    equation = c.text("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(c.ins) or not 1 <= len(terms) <= 2:
        raise c.fail(f"equation '{equation[:100]}' must have one or two operands and a result")
    wide = max(
        (len(c.shape(i)) - len(t.replace("...", "")) for i, t in enumerate(terms) if "..." in t), default=0
    )
    sizes: dict[str, int] = {}
    named: list[list[str]] = []
    for i, term in enumerate(terms):
        shape = c.shape(i)
        head, dots, tail = term.partition("...")
        own = len(shape) - len(head) - len(tail)
        if own < 0 or (own and not dots):
            raise c.fail(f"'{term[:50]}' of equation '{equation[:100]}' does not fit shape {shape}")
        names = [*head, *[f"...{k}" for k in range(wide - own, wide)], *tail]
        if len(set(names)) != len(names):
            raise c.fail(
                f"equation '{equation[:100]}' takes a diagonal, which pase does not support",
                fix="take the diagonal with tf.linalg.diag_part first",
            )
        for n, s in zip(names, shape, strict=True):
            if sizes.get(n, 1) not in (1, s) and s != 1:
                raise c.fail(f"'{n}' has sizes {sizes[n]} and {s} in equation '{equation[:100]}'")
            sizes[n] = max(sizes.get(n, 1), s)
        named.append(names)
    head, dots, tail = out.partition("...")
    result = [*head, *([f"...{k}" for k in range(wide)] if dots else []), *tail]
    if missing := [n for n in result if n not in sizes]:
        raise c.fail(f"'{missing[0]}' of the result is in no operand of equation '{equation[:100]}'")
    dropped = [
        [n if c.shape(i)[k] == sizes[n] else "" for k, n in enumerate(names)] for i, names in enumerate(named)
    ]
    if len(named) == 1:
        x, names = _without(c, c.x(0), dropped[0])
        x, names = _summed(c, x, names, set(result))
        return [nests.transpose(c.b, x, [names.index(n) for n in result])]
    return [product_of(c, c.x(0), c.x(1), dropped[0], dropped[1], result, c.type("T"))]
