"""The work of a launched op of a compiled program: its FLOPs, the bytes that it moves, and its place in the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pase.hlo.module import Computation, Instruction, Module, Shape

__all__ = ["HloWork", "OpWork", "is_product", "op_work"]

HloWork = Literal[
    "product", "convolution", "attention", "norm", "elementwise", "copy", "embedding", "collective", "other"
]

_PRODUCTS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__onednn$matmul")
"""Targets of custom calls that are matrix products. Their first two operands are the factors."""
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_OPCODES: tuple[tuple[HloWork, tuple[str, ...]], ...] = (
    ("collective", ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "send", "recv")),
    ("convolution", ("convolution",)),
    ("product", ("dot",)),
    ("embedding", ("scatter", "gather")),
    ("norm", ("reduce", "sort", "select-and-scatter", "topk", "cholesky", "triangular-solve", "fft")),
    (
        "copy",
        ("copy", "transpose", "pad", "concatenate", "dynamic-update-slice", "reverse", "iota", "broadcast"),
    ),
    ("copy", ("slice", "dynamic-slice", "reshape", "convert", "bitcast-convert", "constant", "tuple")),
)
"""An op is what the first of these says that one of its opcodes fits. Opcodes end at "-start" and the like."""
_VIEWS = ("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element")
_DEEP = 8


@dataclass(frozen=True, kw_only=True)
class OpWork:
    """What a launched op does. flops: 0 if it is no product. nbytes: read and written in memory at least."""

    work: HloWork
    flops: int
    nbytes: int
    dtype: str
    """The element type of a product's first factor, or of the op's result."""
    name: str
    """The framework's name of the op, or of its neighbour ("copy of …", "for …"); "" if the program has none."""
    source: str


def is_product(i: Instruction) -> bool:
    """Whether an instruction is one matrix product."""
    return i.opcode == "dot" or i.custom_call_target in _PRODUCTS


def op_work(module: Module, place: Computation, i: Instruction) -> OpWork:
    """Returns the work of an instruction of a computation, with all that is fused into it."""
    inside = [(place, i)]
    if i.opcode == "fusion":
        inside = [(c, x) for c in module.called(i) for x in c.instructions.values()]
    heavy = next(((c, x) for c, x in inside if _kind(x) in ("product", "convolution", "attention")), None)
    first = next(iter(i.shape.arrays()), Shape(dtype=""))
    dtype = first.dtype
    if heavy is not None and heavy[1].operands:
        dtype = heavy[0].operands(heavy[1])[0].shape.dtype
    name, source = _named(place, i, [x for _, x in inside])
    if not name and place is module.entry and _is_returned(place, i):
        name = f"for a result of {module.name}"
    return OpWork(
        work=_work([x for _, x in inside]),
        flops=sum(_flops(c, x) for c, x in inside),
        nbytes=_fused_bytes(module, i) if i.opcode == "fusion" else _bytes(place, i),
        dtype=dtype,
        name=name,
        source=source,
    )


def _kind(i: Instruction) -> HloWork:
    target = i.custom_call_target.lower()
    if is_product(i):
        return "product"
    if target:
        for words, kind in (
            (("conv",), "convolution"),
            (("fmha", "attention", "flash"), "attention"),
            (("matmul", "gemm"), "product"),
            (("norm", "topk", "sort", "softmax"), "norm"),
        ):
            if any(w in target for w in words):
                return kind  # type: ignore[return-value]
        return "other"
    return next((kind for kind, starts in _OPCODES if i.opcode.startswith(starts)), "elementwise")


def _work(inside: list[Instruction]) -> HloWork:
    """Returns the kind of a fusion: its heaviest op's. It only copies if it has no arithmetic, except on indices."""
    whole = [x for x in inside if x.opcode not in _VIEWS]
    kinds = {_kind(x) for x in [x for x in whole if x.shape.dims or x.shape.parts] or whole}
    for kind in (
        "collective",
        "convolution",
        "attention",
        "product",
        "embedding",
        "norm",
        "elementwise",
        "copy",
    ):
        if kind in kinds:
            return kind
    return "other" if kinds else "copy"


def _flops(c: Computation, i: Instruction) -> int:
    """Returns the FLOPs of one product, convolution or fused attention; a multiply-add counts as two."""
    operands = [next(iter(o.shape.arrays()), Shape(dtype="")).dims for o in c.operands(i)]
    result = next(iter(i.shape.arrays()), Shape(dtype="")).dims
    kind = _kind(i)
    if kind == "product" and len(operands) > 1:
        noted = i.noted("lhs_contracting_dimensions") if i.custom_call_target else None
        dims = i.contracted if noted is None else tuple(int(d) for d in noted)
        return 2 * math.prod(result) * math.prod(operands[0][d] for d in dims if d < len(operands[0]))
    if kind == "convolution" and len(operands) > 1:
        target = i.custom_call_target
        filters, out = operands[1], result
        if "BackwardInput" in target:
            out = operands[0]
        elif "BackwardFilter" in target:
            filters, out = result, operands[1]
        of_filter, of_out = i.out_features
        if of_filter >= len(filters) or of_out >= len(out):
            return 0
        return 2 * math.prod(out) * math.prod(filters) // max(out[of_out], 1)
    scores = (i.noted("intermediate_tensor_shape") or {}).get("dimensions") if kind == "attention" else None
    if scores and operands:
        batch, heads, rows, columns = (int(x) for x in scores)
        width = math.prod(operands[0]) // max(batch * heads * rows, 1)
        pairs = batch * heads * rows * columns // (2 if "CAUSAL" in str(i.noted("mask_type")) else 1)
        # Forward has two products, backward five.
        return 2 * pairs * width * (5 if "Backward" in i.custom_call_target else 2)
    return 0


def _bytes(place: Computation, i: Instruction) -> int:
    if i.opcode in _SLICES:
        return 2 * i.shape.nbytes
    operands = place.operands(i)
    if i.opcode in _IN_PLACE and len(operands) > 1:
        return 2 * operands[-1 if i.opcode == "scatter" else 1].shape.nbytes
    results = list(i.shape.arrays())
    # A library's scratch memory is the last result, in bytes.
    if i.custom_call_target and len(results) > 1 and results[-1].dtype in ("u8", "s8"):
        results = results[:-1]
    return sum(o.shape.nbytes for o in operands) + sum(r.nbytes for r in results)


def _fused_bytes(module: Module, i: Instruction) -> int:
    """Returns the bytes that a fusion reads and writes. Of an array of which it takes slices, only those count."""
    total = 0
    for c in module.called(i):
        users: dict[int, list[Instruction]] = {}
        for x in c.instructions.values():
            for o in x.operands:
                users.setdefault(o, []).append(x)
        for x in c.instructions.values():
            if x.opcode == "parameter":
                total += _read(c, users, x, _DEEP)
        roots = c.operands(c.root) if c.root.opcode == "tuple" else [c.root]
        for root in roots:
            while root.opcode in ("bitcast", "reshape") and root.operands:
                root = c.operands(root)[0]
            written = root
            if root.opcode in _IN_PLACE and len(root.operands) > 1:
                written = c.operands(root)[-1 if root.opcode == "scatter" else 1]
            total += written.shape.nbytes
    return total


def _read(c: Computation, users: dict[int, list[Instruction]], x: Instruction, deep: int) -> int:
    """Returns the bytes that the users of an array read of it: all, or its slices."""
    total = 0
    for user in users.get(x.id, ()):
        if user.opcode in ("bitcast", "reshape") and deep:
            total += _read(c, users, user, deep - 1)
        elif user.opcode in _SLICES and user.operands[0] == x.id:
            total += user.shape.nbytes
        elif user.opcode in _IN_PLACE and user.operands[0] == x.id:
            continue  # it is written in place
        else:
            return x.shape.nbytes
    return min(total, x.shape.nbytes)


def _named(place: Computation, i: Instruction, inside: list[Instruction]) -> tuple[str, str]:
    """Returns the framework's name and the source line of an op. An op that XLA adds has the name of what it copies
    ("copy of …") or, if it makes a value, of what reads that ("for …")."""
    for x in (i, *inside):
        if x.op_name:
            return x.op_name, x.source or i.source
    for word, nearest in (("copy of", _first_operand), ("for", _first_reader)):
        at: Instruction | None = i
        for _ in range(_DEEP):
            at = nearest(place, at) if at is not None else None
            if at is not None and at.op_name:
                return f"{word} {at.op_name}", at.source
    return "", ""


def _first_operand(place: Computation, i: Instruction) -> Instruction | None:
    return next(iter(place.operands(i)), None)


def _first_reader(place: Computation, i: Instruction) -> Instruction | None:
    return next((x for x in place.instructions.values() if i.id in x.operands), None)


def _is_returned(place: Computation, i: Instruction) -> bool:
    """Whether what an op makes is a result of its computation, unchanged."""
    at: Instruction | None = i
    for _ in range(_DEEP):
        if at is None or at.id == place.root.id:
            break
        at = _first_reader(place, at)
    return at is not None and at.id == place.root.id
