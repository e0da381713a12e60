"""The loop nests that every frontend lowers into: one function per kind, which defines the access maps of that kind.

Shapes are sequences of sizes (ints or sympy expressions). Every function adds one nest to the builder and returns the
tensor or tensors that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pase.errors import PaseError
from pase.ir import AccessMap, DimKind, Size, Tensor, Walk
from pase.ir.functions import Function
from pase.ir.literals import Literals, Number, literal
from pase.ir.parameters import Concatenate, EqualPart, Parameters, Reshape
from pase.ir.sizes import is_one, quotient
from pase.ops.builder import Computes, Dims, GraphBuilder, Read, Write, parallel_dims, plain_map

__all__ = [
    "batched",
    "broadcast",
    "concat",
    "contract",
    "elementwise",
    "generate",
    "grouped_product",
    "opaque",
    "part",
    "put",
    "reduce",
    "reshape",
    "restrict",
    "sequential",
    "taken",
    "transpose",
]


def elementwise(
    b: GraphBuilder,
    function: Function,
    inputs: Sequence[Tensor | Number | None],
    dtypes: Sequence[str],
    *,
    name: str = "",
    flops: float | None = None,
    shape: Sequence[Size] | None = None,
    differentiable: bool = True,
) -> tuple[Tensor, ...]:
    """An elementwise op. Its results have one shape, to which the inputs broadcast as in numpy.

    inputs: the function's operands, in its order: tensors and numbers. None stands for one that the graph does not
        hold; the op is then priced, but nothing can compute it from the graph.
    name: the framework's name, if it differs from the function's.
    flops: FLOPs per point, if they differ from the function's (a sum of many operands).
    """
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    if shape is None:
        rank = max((len(t.shape) for t in tensors), default=0)
        shape = [1] * rank
        for t in tensors:
            for i, s in enumerate(t.shape, start=rank - len(t.shape)):
                if is_one(shape[i]):
                    shape[i] = s
                elif not is_one(s) and s != shape[i]:
                    raise PaseError(
                        f"shapes {[t.shape for t in tensors]} do not broadcast",
                        where=f"{name or function.name} at {b.source}",
                    )
    reads = []
    for t in tensors:
        lead = len(shape) - len(t.shape)
        walks = tuple(Walk(() if is_one(s) else (f"d{i + lead}",)) for i, s in enumerate(t.shape))
        reads.append(Read(t, AccessMap(walks)))
    writes = [Write(tuple(shape), d, plain_map(shape)) for d in dtypes]
    literals: Literals = None
    if all(t is not None for t in inputs):
        literals = tuple(None if isinstance(t, Tensor) else literal(t) for t in inputs)
    return b.nest(
        name or function.name,
        "elementwise",
        reads,
        writes,
        parallel_dims(shape),
        Computes(
            function=function,
            differentiable=differentiable,
            literals=() if len(tensors) == len(inputs) else literals,
        ),
        flops=flops,
    )


def broadcast(b: GraphBuilder, x: Tensor, shape: Sequence[Size], into: Sequence[int]) -> Tensor:
    """A broadcast: dim i of x becomes dim into[i] of the result; the other dims are new."""
    walks = tuple(Walk(() if is_one(s) else (f"d{j}",)) for s, j in zip(x.shape, into, strict=True))
    write = Write(tuple(shape), x.dtype, plain_map(shape))
    return b.nest("broadcast", "view", [Read(x, AccessMap(walks))], [write], parallel_dims(shape), flops=0)[0]


def transpose(b: GraphBuilder, x: Tensor, order: Sequence[int]) -> Tensor:
    """A transpose: dim i of the result is dim order[i] of x."""
    full = plain_map(x.shape)
    write = Write(tuple(x.shape[i] for i in order), x.dtype, AccessMap(tuple(full.walks[i] for i in order)))
    return b.nest("transpose", "view", [Read(x, full)], [write], parallel_dims(x.shape), flops=0)[0]


def common_factors(
    a: Sequence[Size], b: Sequence[Size]
) -> tuple[list[Size], list[list[int]], list[list[int]]] | None:
    """Factors two shapes of equal size into common sub-dims, major to minor. Returns None if they do not nest.

    Returns the factors and, for each dim of a and of b, the indices of its factors.

    >>> common_factors([6, 4], [2, 3, 4])
    ([2, 3, 4], [[0, 1], [2]], [[0], [1], [2]])
    >>> common_factors([4, 3], [3, 4]) is None
    True
    """
    factors: list[Size] = []
    of_a: list[list[int]] = [[] for _ in a]
    of_b: list[list[int]] = [[] for _ in b]
    i = j = 0
    left: Size = 1
    right: Size = 1
    while True:
        while is_one(left) and i < len(a):
            left, i = a[i], i + 1
        while is_one(right) and j < len(b):
            right, j = b[j], j + 1
        if is_one(left) and is_one(right):
            return factors, of_a, of_b
        if is_one(left) or is_one(right):  # the sizes differ
            return None
        if left == right:
            f, left, right = left, 1, 1
        elif (q := quotient(left, right)) is not None:
            f, left, right = right, q, 1
        elif (q := quotient(right, left)) is not None:
            f, left, right = left, 1, q
        else:
            return None
        of_a[i - 1].append(len(factors))
        of_b[j - 1].append(len(factors))
        factors.append(f)


def reshape(b: GraphBuilder, x: Tensor, shape: Sequence[Size]) -> Tensor:
    """A reshape, which splits and merges dims. If the shapes do not nest (3·4 to 4·3), the dims may not be split. The
    result of a tensor that is read in place (``taken``) is also read in place."""
    common = common_factors(x.shape, shape)
    if common is None:
        dims: Dims = {f"r{i}": (s, "replicated") for i, s in enumerate(x.shape) if not is_one(s)}
        dims |= {f"w{i}": (s, "replicated") for i, s in enumerate(shape) if not is_one(s)}
        read = AccessMap.of(*[() if is_one(s) else (f"r{i}",) for i, s in enumerate(x.shape)])
        write = AccessMap.of(*[() if is_one(s) else (f"w{i}",) for i, s in enumerate(shape)])
    else:
        factors, of_x, of_out = common
        dims = {f"d{i}": (s, "parallel") for i, s in enumerate(factors)}
        read = AccessMap.of(*[tuple(f"d{i}" for i in f) for f in of_x])
        write = AccessMap.of(*[tuple(f"d{i}" for i in f) for f in of_out])
    lies = x.name in b.lying
    out = Write(tuple(shape), x.dtype, write, sparse=lies)
    over = () if lies else None
    computes = Computes(parameters=Reshape() if common is None else None)
    (t,) = b.nest("reshape", "view", [Read(x, read, sparse=lies)], [out], dims, computes, flops=0, over=over)
    b.lying |= {t.name} if lies else set()
    return t


def reduce(
    b: GraphBuilder,
    function: Function,
    inputs: Sequence[Tensor],
    axes: Sequence[int],
    dtypes: Sequence[str],
    *,
    name: str = "",
    keepdims: bool = False,
    combines: bool = True,
) -> tuple[Tensor, ...]:
    """A reduction over ``axes``.

    combines: whether an all-reduce can combine the partial results of shards (sum and max can be, argmax cannot).
    """
    shape = inputs[0].shape
    kind: DimKind = "reduction" if combines else "replicated"
    dims: Dims = {
        f"d{i}": (s, kind if i in axes else "parallel") for i, s in enumerate(shape) if not is_one(s)
    }
    full = plain_map(shape).walks
    kept = [Walk() if i in axes else full[i] for i in range(len(shape)) if keepdims or i not in axes]
    out = tuple(1 if i in axes else s for i, s in enumerate(shape) if keepdims or i not in axes)
    writes = [Write(out, d, AccessMap(tuple(kept))) for d in dtypes]
    reads = [Read(t, plain_map(shape)) for t in inputs]
    return b.nest(name or function.name, "reduce", reads, writes, dims, Computes(function=function))


def contract(
    b: GraphBuilder,
    x: Tensor,
    y: Tensor,
    contracting: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    dtype: str | None = None,
    name: str = "dot_general",
) -> Tensor:
    """A batched matrix product. The result's dims are the batch dims, then x's free dims, then y's free dims."""
    names_x: dict[int, str] = {}
    names_y: dict[int, str] = {}
    dims: Dims = {}
    out: list[tuple[str, Size]] = []

    def new(name: str, size: Size, kind: DimKind) -> str:
        if not is_one(size):
            dims[name] = (size, kind)
        return name

    for k, (i, j) in enumerate(zip(*batch, strict=True)):
        names_x[i] = names_y[j] = new(f"b{k}", x.shape[i], "parallel")
        out.append((names_x[i], x.shape[i]))
    for k, (i, j) in enumerate(zip(*contracting, strict=True)):
        names_x[i] = names_y[j] = new(f"k{k}", x.shape[i], "reduction")
    for letter, t, names in (("m", x, names_x), ("n", y, names_y)):
        for i, s in enumerate(t.shape):
            if i not in names:
                names[i] = new(f"{letter}{i}", s, "parallel")
                out.append((names[i], s))

    def walk(names: Sequence[str]) -> AccessMap:
        return AccessMap.of(*[(n,) if n in dims else () for n in names])

    reads = [Read(t, walk([n[i] for i in range(len(t.shape))])) for t, n in ((x, names_x), (y, names_y))]
    write = Write(tuple(s for _, s in out), dtype or x.dtype, walk([n for n, _ in out]))
    return b.nest(name, "matmul", reads, [write], dims, flops=2.0)[0]


def restrict(
    b: GraphBuilder,
    name: str,
    inputs: Sequence[Tensor],
    shape: Sequence[Size],
    dims_kept: Sequence[bool],
    parameters: Parameters | None = None,
) -> Tensor:
    """A slice, pad, roll or similar. A dim that is kept whole may be split; a dim that changes may not.

    parameters: which elements the result has; None if the graph does not say.
    """
    dims, reads, m = _restricted(inputs, shape, dims_kept)
    write = Write(tuple(shape), inputs[0].dtype, m)
    return b.nest(
        name, "view", reads, [write], dims, Computes(parameters=parameters), flops=1.0, over=m.dims
    )[0]


def put(
    b: GraphBuilder, name: str, inputs: Sequence[Tensor], shape: Sequence[Size], dims_kept: Sequence[bool]
) -> Tensor:
    """An update in place: the second input is written over a part of the first. The rest is not touched."""
    dims, (whole, *others), m = _restricted(inputs, shape, dims_kept)
    write = Write(tuple(shape), inputs[0].dtype, m, sparse=True)
    reads = [replace(whole, sparse=True), *others]
    return b.nest(name, "view", reads, [write], dims, flops=1.0, over=others[0].map.dims)[0]


def taken(
    b: GraphBuilder,
    name: str,
    inputs: Sequence[Tensor],
    shape: Sequence[Size],
    dims_kept: Sequence[bool],
    parameters: Parameters | None = None,
) -> Tensor:
    """A part of the first input; the rest is not touched. A contiguous part (one row of a stack) is read in place."""
    dims, (whole, *others), m = _restricted(inputs, shape, dims_kept)
    cut = max((i for i, kept in enumerate(dims_kept) if not kept), default=-1)
    lies = all(is_one(s) for s in shape[:cut])
    write = Write(tuple(shape), inputs[0].dtype, m, sparse=lies)
    reads = [replace(whole, sparse=True), *others]
    over = () if lies else m.dims
    (t,) = b.nest(name, "view", reads, [write], dims, Computes(parameters=parameters), flops=1.0, over=over)
    b.lying |= {t.name} if lies else set()
    return t


def _restricted(
    inputs: Sequence[Tensor], shape: Sequence[Size], dims_kept: Sequence[bool]
) -> tuple[Dims, list[Read], AccessMap]:
    """The dims, reads and write map of a nest whose inputs share the result's layout in each dim that is kept."""
    dims: Dims = {}
    reads = []
    for k, t in enumerate(inputs):
        if len(t.shape) != len(shape):  # an index or a padding value, which is a scalar
            reads.append(Read(t, AccessMap.of(*[()] * len(t.shape))))
            continue
        walks = []
        for i, s in enumerate(t.shape):
            if is_one(s):
                walks.append(Walk())
            elif dims_kept[i]:
                dims[f"d{i}"] = (s, "parallel")
                walks.append(Walk((f"d{i}",)))
            else:
                dims[f"r{k}_{i}"] = (s, "replicated")
                walks.append(Walk((f"r{k}_{i}",)))
        reads.append(Read(t, AccessMap(tuple(walks))))
    out = []
    for i, s in enumerate(shape):
        if is_one(s):
            out.append(Walk())
        else:
            key = f"d{i}" if dims_kept[i] else f"w{i}"
            dims.setdefault(key, (s, "parallel" if dims_kept[i] else "replicated"))
            out.append(Walk((key,)))
    return dims, reads, AccessMap(tuple(out))


def part(b: GraphBuilder, name: str, x: Tensor, axis: int, parts: int, index: int) -> Tensor:
    """The part ``index`` of ``parts`` equal parts of a dim. Shards suffice if x is split equally within each part."""
    size = quotient(x.shape[axis], parts)
    assert size is not None
    shape = tuple(size if i == axis else s for i, s in enumerate(x.shape))
    write = plain_map(shape)
    walks = [Walk(("p", *w.dims)) if i == axis else w for i, w in enumerate(write.walks)]
    dims = parallel_dims(shape) | {"p": (parts, "replicated")}
    read = Read(x, AccessMap(tuple(walks)))
    out = Write(shape, x.dtype, write)
    which = EqualPart(axis=axis, index=index, count=parts)
    return b.nest(name, "view", [read], [out], dims, Computes(parameters=which), flops=1.0, over=write.dims)[
        0
    ]


def concat(b: GraphBuilder, inputs: Sequence[Tensor], axis: int) -> Tensor:
    """A concatenation. The dim that is joined may not be split."""
    shape = list(inputs[0].shape)
    total: Size = 0
    for t in inputs:
        total = total + t.shape[axis]  # type: ignore[operator]
    shape[axis] = total
    kept = [i != axis for i in range(len(shape))]
    return restrict(b, "concatenate", inputs, shape, kept, Concatenate(axis=axis))


def sequential(
    b: GraphBuilder,
    function: Function,
    inputs: Sequence[Tensor],
    axis: int,
    outs: Sequence[tuple[tuple[Size, ...], str]],
    *,
    name: str = "",
    flops: float | None = None,
    parameters: Parameters | None = None,
) -> tuple[Tensor, ...]:
    """A cumulative sum, sort, top-k or similar. Every dim except ``axis`` may be split."""
    shape = inputs[0].shape
    dims: Dims = {
        f"d{i}": (s, "replicated" if i == axis else "parallel") for i, s in enumerate(shape) if not is_one(s)
    }
    writes = []
    for out, dtype in outs:
        walks = []
        for i, s in enumerate(out):
            key = f"d{i}" if i != axis or s == shape[axis] else "w"
            if is_one(s):
                walks.append(Walk())
                continue
            dims.setdefault(key, (s, "replicated"))
            walks.append(Walk((key,)))
        writes.append(Write(tuple(out), dtype, AccessMap(tuple(walks))))
    reads = [Read(t, plain_map(t.shape)) for t in inputs]
    return b.nest(
        name or function.name,
        "sequential",
        reads,
        writes,
        dims,
        Computes(function=function, parameters=parameters),
        flops=flops,
    )


def generate(
    b: GraphBuilder,
    function: Function,
    shape: Sequence[Size],
    dtype: str,
    inputs: Sequence[Tensor] = (),
    *,
    name: str = "",
    parameters: Parameters | None = None,
    by_row: bool = False,
) -> Tensor:
    """Generated values (iota, random bits). Every dim may be split; inputs are small and replicated.

    by_row: inputs, such as an array of keys, have the first dims of the result, and are split as these are.
    """
    dims, m = parallel_dims(shape), plain_map(shape)
    reads = []
    for k, t in enumerate(inputs):
        if by_row:
            reads.append(Read(t, AccessMap(m.walks[: len(t.shape)])))
            continue
        walks = [() if is_one(s) else (f"r{k}_{i}",) for i, s in enumerate(t.shape)]
        dims |= {f"r{k}_{i}": (s, "replicated") for i, s in enumerate(t.shape) if not is_one(s)}
        reads.append(Read(t, AccessMap.of(*walks)))
    write = Write(tuple(shape), dtype, m)
    return b.nest(
        name or function.name,
        "generate",
        reads,
        [write],
        dims,
        Computes(function=function, differentiable=False, parameters=parameters),
        over=m.dims,
    )[0]


def opaque(
    b: GraphBuilder,
    name: str,
    inputs: Sequence[Tensor],
    outs: Sequence[tuple[tuple[Size, ...], str]],
    *,
    flops: float = 0.0,
    differentiable: bool = True,
) -> tuple[Tensor, ...]:
    """An op that may not be split: every device computes all of it.

    flops: FLOPs of the whole op; with 0 only its memory traffic is priced.
    """
    dims: Dims = {}
    reads, writes = [], []
    for k, t in enumerate(inputs):
        walks = [() if is_one(s) else (f"r{k}_{i}",) for i, s in enumerate(t.shape)]
        dims |= {f"r{k}_{i}": (s, "replicated") for i, s in enumerate(t.shape) if not is_one(s)}
        reads.append(Read(t, AccessMap.of(*walks)))
    for k, (shape, dtype) in enumerate(outs):
        walks = [() if is_one(s) else (f"w{k}_{i}",) for i, s in enumerate(shape)]
        dims |= {f"w{k}_{i}": (s, "replicated") for i, s in enumerate(shape) if not is_one(s)}
        writes.append(Write(tuple(shape), dtype, AccessMap.of(*walks)))
    return b.nest(
        name, "opaque", reads, writes, dims, Computes(differentiable=differentiable), flops=flops, over=()
    )


def batched(
    b: GraphBuilder,
    name: str,
    inputs: Sequence[Tensor],
    outs: Sequence[tuple[tuple[Size, ...], str]],
    rank: int,
    *,
    flops: float,
    whole: Sequence[Tensor] = (),
    function: Function | None = None,
) -> tuple[Tensor, ...]:
    """An op whose first ``rank`` dims, equal in all tensors, may be split; its other dims may not.

    flops: FLOPs per point of the first ``rank`` dims.
    whole: inputs that have none of these dims.
    function: what the op computes, if its derivative is known.
    """
    dims: Dims = {}

    def walk(shape: Sequence[Size], prefix: str, rank: int = rank) -> AccessMap:
        out = []
        for i, s in enumerate(shape):
            if is_one(s):
                out.append(Walk())
                continue
            key = f"d{i}" if i < rank else f"{prefix}_{i}"
            dims[key] = (s, "parallel" if i < rank else "replicated")
            out.append(Walk((key,)))
        return AccessMap(tuple(out))

    reads = [Read(t, walk(t.shape, f"r{k}")) for k, t in enumerate(inputs)]
    reads += [Read(t, walk(t.shape, f"h{k}", 0)) for k, t in enumerate(whole)]
    writes = [Write(tuple(shape), dtype, walk(shape, f"w{k}")) for k, (shape, dtype) in enumerate(outs)]
    over = [d for d, (_, kind) in dims.items() if kind == "parallel"]
    return b.nest(name, "opaque", reads, writes, dims, Computes(function=function), flops=flops, over=over)


def grouped_product(
    b: GraphBuilder,
    x: Tensor,
    w: Tensor,
    x_contracting: int,
    w_contracting: int,
    w_group: int,
    dtype: str,
    *,
    ends: Tensor | None = None,
) -> Tensor:
    """A grouped matrix product (ragged dot): rows of x [m k], in groups, times w [g k n], giving [m n]. Every row is
    multiplied by the weights of its group.

    ends: the index after each group's last row, [g], replicated. If it is given, rows may be split, and groups may be
        split too: a device then computes the rows of its own groups and zeros for the others, and the result is a
        partial sum.
    """
    (m,) = {0, 1} - {x_contracting}
    (n,) = {0, 1, 2} - {w_contracting, w_group}
    dims: Dims = {}

    def walk(name: str, size: Size, kind: DimKind) -> Walk:
        if is_one(size):
            return Walk()
        dims[name] = (size, kind)
        return Walk((name,))

    known, groups = ends is not None, w.shape[w_group]
    rows = walk("m", x.shape[m], "parallel" if known else "replicated")
    cols, inner = walk("n", w.shape[n], "parallel"), walk("k", x.shape[x_contracting], "reduction")
    group = walk("g", groups, "reduction" if known else "replicated")
    walks_w = [Walk(), Walk(), Walk()]
    walks_w[w_contracting], walks_w[w_group], walks_w[n] = inner, group, cols
    walks_x = (rows, inner) if m == 0 else (inner, rows)
    reads = [Read(x, AccessMap(walks_x)), Read(w, AccessMap(tuple(walks_w)))]
    write = Write((x.shape[m], w.shape[n]), dtype, AccessMap((rows, cols)))
    if ends is None:
        over = [d for d in dims if d != "g"]
        return b.nest("ragged_dot", "matmul", reads, [write], dims, flops=2.0, over=over)[0]
    over = list(dims)  # groups are assumed equal, so a device with one of two groups has half of the rows
    reads.append(Read(ends, AccessMap((walk("e", groups, "replicated"),))))
    return b.nest("ragged_dot", "matmul", reads, [write], dims, flops=2.0 / groups, over=over)[0]
