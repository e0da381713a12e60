"""Matrix products and einsum, in the form that several frameworks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.values import Site, Value
from pase.ir import functions
from pase.ops import nests

__all__ = ["NamedDims", "einsum", "matmul", "product"]


def matmul(c: Site, x: Value, y: Value, dtype: str | None = None) -> Value:
    """numpy's matmul: a product over the last two dims; the dims before are batch dims and broadcast."""
    if not x.shape or not y.shape:
        raise c.fail("it is a matrix product, but an operand is a scalar")
    a = c.reshape(x, (1, *x.shape)) if len(x.shape) == 1 else x
    b = c.reshape(y, (*y.shape, 1)) if len(y.shape) == 1 else y
    if a.shape[-1] != b.shape[-2]:
        raise c.fail(
            f"it multiplies {list(x.shape)} by {list(y.shape)}: {a.shape[-1]} columns do not match {b.shape[-2]} rows"
        )
    lead = c.broadcast(a.shape[:-2], b.shape[:-2])
    full = c.shape((*lead, a.shape[-2], b.shape[-1]))
    out = list(full)
    if len(y.shape) == 1:
        out.pop(-1)
    if len(x.shape) == 1:
        out.pop(-1 if len(y.shape) == 1 else -2)
    if math.prod(full) == 0 or a.elements == 0:
        return c.nothing(out, dtype or x.dtype)
    # Dims of size one and missing dims are dropped. The others are batch dims (in both) or free dims (in one).
    if len(y.shape) == 2 and len(x.shape) == 2 and (whole := c.unmerged(x)) is not x:
        made = matmul(c, whole, y, dtype)
        return c.reshape(made, out)
    batch_a: list[int] = []
    batch_b: list[int] = []
    only_a: list[int] = []
    only_b: list[int] = []
    for i in range(len(lead)):
        ia, ib = i - len(lead) + len(a.shape) - 2, i - len(lead) + len(b.shape) - 2
        in_a, in_b = ia >= 0 and a.shape[ia] != 1, ib >= 0 and b.shape[ib] != 1
        if in_a and in_b:
            batch_a.append(ia)
            batch_b.append(ib)
        elif in_a:
            only_a.append(i)
        elif in_b:
            only_b.append(i)
    ones_a = [i for i in range(len(a.shape) - 2) if a.shape[i] == 1]
    ones_b = [i for i in range(len(b.shape) - 2) if b.shape[i] == 1]
    kept_a = [i for i in range(len(a.shape)) if i not in ones_a]
    kept_b = [i for i in range(len(b.shape)) if i not in ones_b]
    a = c.reshape(a, [a.shape[i] for i in kept_a])
    b = c.reshape(b, [b.shape[i] for i in kept_b])
    shared = [i for i, n in enumerate(lead) if n != 1 and i not in only_a and i not in only_b]
    product = nests.contract(
        c.b,
        c.tensor(a),
        c.tensor(b),
        ([len(a.shape) - 1], [len(b.shape) - 2]),
        ([kept_a.index(i) for i in batch_a], [kept_b.index(i) for i in batch_b]),
        dtype,
    )
    made = c.value(product)
    # The order of the dims: shared batch, the batch of a only, rows, the batch of b only, columns.
    stands = [*shared, *only_a, "m", *only_b, "n"]
    wanted = [i for i, n in enumerate(lead) if n != 1] + ["m", "n"]
    made = c.transpose(made, [stands.index(w) for w in wanted])
    return c.reshape(made, out)


def einsum(
    c: Site, equation: str, values: Sequence[Value], dtype: str | None = None, name: str = "dot_general"
) -> Value:
    """An einsum. Operands are contracted from the left. A dim that is in no later operand and not in the result is
    summed as early as possible."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(values) or len(text) > 400:
        raise c.fail(f"equation '{text[:60]}' does not match {len(values)} operands")
    names: list[list[str]] = []
    dots = 0
    for t, v in zip(terms, values, strict=True):
        letters = t.replace("...", "")
        n = len(v.shape) - len(letters) if "..." in t else 0
        if (not letters.isalpha() and letters) or n < 0 or len(letters) + n != len(v.shape):
            raise c.fail(f"equation '{text[:60]}' does not fit shape {list(v.shape)}")
        dots = max(dots, n)
        front, _, tail = t.partition("...")
        names.append([*front, *([f".{i}" for i in range(-n, 0)] if "..." in t else []), *tail])
    every = [x for t in names for x in t]
    spread = [f".{i}" for i in range(-dots, 0)]
    if arrow:
        before, ellipsis, behind = right.partition("...")
        out = [*before, *(spread if ellipsis else []), *behind]
    else:
        out = [*spread, *sorted(x for x in set(every) if every.count(x) == 1 and x not in spread)]
    if len(set(out)) != len(out) or any(x not in every for x in out):
        raise c.fail(f"equation '{text[:60]}' has a dim in its result that no operand has")
    sizes: dict[str, int] = {}
    for letters_of, v in zip(names, values, strict=True):
        for x, s in zip(letters_of, v.shape, strict=True):
            if sizes.setdefault(x, s) not in (s, 1) and s != 1:
                raise c.fail(f"equation '{text[:60]}': dim '{x}' has both size {sizes[x]} and {s}")
            sizes[x] = max(sizes[x], s)
    shape = c.shape([sizes[x] for x in out])
    if math.prod(sizes.values()) == 0:
        return c.nothing(shape, values[0].dtype)
    if any(len(set(t)) != len(t) for t in names):  # a diagonal
        work = 2.0 * math.prod(float(s) for s in sizes.values())
        (t_out,) = nests.opaque(c.b, "einsum", c.tensors(*values), [(shape, values[0].dtype)], flops=work)
        return c.value(t_out)
    have, value = _without(c, names[0], values[0])
    for k in range(1, len(values)):
        later = {*out, *(x for t in names[k + 1 :] for x in t)}
        more, other = _without(c, names[k], values[k])
        first = [x for x in have if x in more]
        order = [*first, *(x for x in (*have, *more) if x not in first)]
        kept = [x for x in order if x in later]
        value = product(c, (value, have), (other, more), kept, dtype, name)
        have = kept
    have, value = _summed(c, have, value, set(out))
    here = [x for x in out if x in have]
    value = c.transpose(value, [have.index(x) for x in here])
    return c.reshape(value, shape)


NamedDims = tuple[Value, Sequence[str]]
"""A tensor and the names of its dims. "" names a dim of one element, which is dropped."""


def product(
    c: Site,
    x: NamedDims,
    y: NamedDims,
    out: Sequence[str],
    dtype: str | None = None,
    name: str = "dot_general",
) -> Value:
    """A product of two tensors with named dims. A name in ``out`` that neither has is a dim of one element."""
    a, of_a = _dropped(c, *x)
    b, of_b = _dropped(c, *y)
    of_a, a = _summed(c, of_a, a, {*of_b, *out})
    of_b, b = _summed(c, of_b, b, {*of_a, *out})
    shared = [n for n in of_a if n in of_b]
    batch = [n for n in shared if n in out]
    over = [n for n in shared if n not in out]
    made = nests.contract(
        c.b,
        c.tensor(a),
        c.tensor(b),
        ([of_a.index(n) for n in over], [of_b.index(n) for n in over]),
        ([of_a.index(n) for n in batch], [of_b.index(n) for n in batch]),
        dtype,
        name=name,
    )
    order = [*batch, *(n for n in of_a if n not in shared), *(n for n in of_b if n not in shared)]
    kept = [n for n in out if n in order]
    value = c.transpose(c.value(made), [order.index(n) for n in kept])
    sizes = dict(zip(kept, value.shape, strict=True))
    return c.reshape(value, [sizes.get(n, 1) for n in out])


def _without(c: Site, names: Sequence[str], v: Value) -> tuple[list[str], Value]:
    """The tensor without its dims of one element, and the names of its other dims."""
    kept = [x for x, s in zip(names, v.shape, strict=True) if s != 1]
    return kept, c.reshape(v, [s for s in v.shape if s != 1])


def _dropped(c: Site, v: Value, names: Sequence[str]) -> tuple[Value, list[str]]:
    """The tensor without the dims named "", and the names of its other dims."""
    return c.reshape(v, [s for s, n in zip(v.shape, names, strict=True) if n]), [n for n in names if n]


def _summed(c: Site, names: list[str], v: Value, wanted: set[str]) -> tuple[list[str], Value]:
    """The tensor, summed over the dims that are not wanted, and the names of its other dims."""
    axes = [i for i, x in enumerate(names) if x not in wanted]
    if not axes:
        return names, v
    (out,) = nests.reduce(c.b, functions.SUM, [c.tensor(v)], axes, [v.dtype])
    return [x for x in names if x in wanted], c.value(out)
