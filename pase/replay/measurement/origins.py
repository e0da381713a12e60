"""Finds what each device op is for: the user's name and line, operand shapes, FLOPs, bytes.

A compiled program (XLA's HLO) states all of that. In a trace of PyTorch, it is the framework's op around the call that
launched the kernel (with ``record_shapes``), and the modules and lines of Python around that op (``with_stack``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pase.files.quantities import bytes_text
from pase.replay.kernels import SINGLE, KernelWork, is_exchange, plain_name, precision_of, work_of
from pase.replay.types import COLLECTIVE, CPU, KINDS, OPERATIONS, CompiledOp, Shapes, Timeline, on_stream

__all__ = ["Origin", "Origins", "origins", "user_name"]

_HOST, _RUNTIME, _ANNOTATION = (KINDS.index(k) for k in ("host", "runtime", "annotation"))
_FLOPS = ("product", "convolution", "attention")
_FACTORS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::matmul", "aten::_scaled_mm", "aten::_int_mm"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation", "aten::addbmm"), (1, 2)),
}
"""Op of PyTorch → the places of the factors of its matrix product among its operands."""
_LINE = re.compile(r"^(?!<|\.\.\.)(?:.*/)?(?P<file>[^/]+\.py)\((?P<line>\d+)\): (?P<function>.*)$")
_CONTROL = {
    *("while", "body", "cond", "scan", "checkpoint", "remat", "rematted_computation", "shard_map"),
    *("closed_call", "pjit", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"),
}
"""What JAX adds to the names of ops: loops, branches, recomputed parts, calls."""
_MODULE = re.compile(r"^nn\.Module: (?P<name>\w+?)(?:_\d+)?$")
_NODE = "autograd::engine::evaluate_function: "
_DTYPES = {
    "bf16": "bf16",
    "f16": "fp16",
    "f32": "32-bit",
    "f64": "fp64",
    "s8": "int8",
    "f8e4m3fn": "fp8",
    "f8e5m2": "fp8",
}
_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4}
_BY_BYTES = {1: "8-bit", 2: "16-bit", 4: "32-bit", 8: "fp64"}
"""The precision of a product of which only the bytes of an element are known."""
_NUMBERED = re.compile(r"\.\d+$")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a device op is for. Ops of one origin are shown together.

    kind: the kind of work or the collective; a product's with its precision ("product bf16").
    name: the user's name of the op; where: the module or line of the program; "" if unknown.
    flops: 0 if it has none, −1 if unknown. nbytes: what it reads and writes in memory at least; −1 if unknown.
    precision: of a product, convolution or attention; "" if unknown.
    rows: the sizes of a product's dims that are known to be lengths of rows in memory.
    """

    kind: str
    name: str
    where: str = ""
    operands: Shapes = ()
    product: Shapes = ()
    itemsize: int = 0
    flops: int = 0
    nbytes: int = -1
    precision: str = ""
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Origins:
    """of: device op → its origin. call: device op → a number that the ops of one call share (a product and the fill
    before it)."""

    of: dict[int, Origin]
    call: dict[int, int]


def origins(t: Timeline, rank: int) -> Origins:
    """Returns the origins of all device ops of a rank."""
    here = np.flatnonzero(t.rank_of == rank)
    device = here[on_stream(t["kind"][here])]
    device = device[np.argsort(t["start_ns"][device], kind="stable")]
    around = _Around(t, here)
    keys: dict[int, tuple[object, ...]] = {}
    known: dict[tuple[object, ...], Origin] = {}
    call: dict[int, int] = {}
    last: dict[int, tuple[int, int]] = {}
    for e in device.tolist():
        name = t.names[int(t["name"][e])]
        if int(t["kind"][e]) == COLLECTIVE:
            key: tuple[object, ...] = (name, int(t["operation"][e]), int(t["nbytes"][e]), int(t["group"][e]))
        elif name in t.compiled:
            key = (name,)
        else:
            key = (name, around.of(e))
        if key not in known:
            if int(t["kind"][e]) == COLLECTIVE:
                known[key] = _collective(t, e)
            elif name in t.compiled:
                known[key] = _compiled(name, t.compiled[name])
            else:
                known[key] = _launched(t, name, around.of(e))
        keys[e] = key
        # Kernels of one call: those of one op of the framework or, in a compiled program, those in a row.
        lane, number = int(t["lane"][e]), int(t["name"][e])
        begun = around.call(e)
        if begun < 0 and name in t.compiled and last.get(lane, (-1, -1))[0] == number:
            begun = last[lane][1]
        call[e] = begun if begun >= 0 else e
        last[lane] = (number, call[e])
    told = _with_one_precision(list(known.values()))
    if t.devices.get(rank) != CPU:  # only matrix units want aligned rows
        told = _with_rows(told, bool(t.compiled))
    known = dict(zip(known, told, strict=True))
    return Origins(of={e: known[key] for e, key in keys.items()}, call=call)


def _with_one_precision(found: list[Origin]) -> list[Origin]:
    """Returns the origins with one precision for the kernels of one op: some names have it ("bf16"), others only show
    that elements have 16 or 8 bits. FLOPs of an op whose kernels have several are not known of any of them."""
    alike: dict[Origin, set[str]] = {}
    for o in found:
        if o.precision and o.flops > 0 and not o.product:
            alike.setdefault(replace(o, kind=o.kind.split()[0], precision=""), set()).add(o.precision)
    out = []
    for o in found:
        work = o.kind.split()[0]
        named = alike.get(replace(o, kind=work, precision=""), {o.precision})
        if len(named) > 1 and (specific := named - {"16-bit", "8-bit"}) and len(specific) == 1:
            (precision,) = specific
            o = replace(o, kind=f"{work} {precision}", precision=precision)
        elif len(named) > 1:
            o = replace(o, flops=-1)
        out.append(o)
    return out


def _with_rows(found: list[Origin], compiled: bool) -> list[Origin]:
    """Returns the origins with the sizes of rows of their products.

    Arrays of a compiled program have rows of their last dim. In PyTorch, a factor may be a transposed view, which its
    dims do not show, but a result is not. So there, a size is one of a row if a result of the rank has such rows.
    """
    results = [x for o in found for x in (o.product if compiled else o.product[2:])]
    rows = {x[-1] for x in results if x}  # the product of two vectors is a number
    return [
        replace(o, rows=tuple(sorted({d for x in o.product for d in x[-2:]} & rows))) if o.product else o
        for o in found
    ]


def _collective(t: Timeline, e: int) -> Origin:
    name = t.names[int(t["name"][e])]
    operation = OPERATIONS[int(t["operation"][e])]
    if is_exchange(name):
        operation = "combine" if "combine" in name else "dispatch"
        if re.search(r"notify|cached|layout|clean", name):
            operation += " (setup)"
    group = t.groups[int(t["group"][e])] if t["group"][e] >= 0 else None
    ways = f" of {len(group.ranks)} ranks" if group is not None and len(group.ranks) > 1 else ""
    size = int(t["nbytes"][e])
    return Origin(
        kind=operation or "communication",
        name=operation or name[:60],
        where=f"{bytes_text(size)}{ways}" if size >= 0 else ways.strip(),
    )


def _compiled(name: str, op: CompiledOp) -> Origin:
    precision = ""
    if op.work in _FLOPS:
        precision = _DTYPES.get(op.dtype, op.dtype)
        if precision == "32-bit" and precision_of(op.kernel) in SINGLE:
            precision = precision_of(op.kernel)
    added = next((x for x in ("copy of", "for") if op.op_name.startswith(f"{x} ")), "")
    path = op.op_name.removeprefix(added).lstrip()
    shown = path.rsplit("/", 1)[-1]
    where = re.sub(r"^.*/", "", op.source)
    if modules := scopes(path):
        where = f"{modules}, {where}" if where else modules
    if not path:
        shown = _NUMBERED.sub("", name)
    elif "/" not in path and not where:
        # A copy of an argument of the program, whose name is the user's: "params['head']['w']".
        shown, where = op.work or "copy", path
    elif added:
        shown = f"{added} {shown}" if added == "copy of" else f"{op.work} {added} {shown}"
    return Origin(
        kind=f"{op.work} {precision}".strip() if op.work else work_of(op.kernel or name),
        name=shown + (", backward" if op.part == "backward" else ""),
        where=where,
        operands=op.operands,
        product=op.product,
        itemsize=op.itemsize,
        flops=op.flops if op.flops or op.work not in _FLOPS else -1,
        nbytes=op.nbytes,
        precision=precision,
    )


def scopes(path: str) -> str:
    """Returns the innermost modules and scopes of the user in JAX's name of an op; those that repeat have one name.

    >>> scopes("jit(step)/transpose(jvp(LM))/block1/Attention_0/query/while/body/...qhd,...khd->...hqk/dot_general")
    'block.Attention.query'
    >>> scopes("jit(step)/jvp()/dot_general"), scopes("params['head']['w']")
    ('', '')
    """
    inner = path.split("/")[:-1]
    found = [x for x in inner if x.isidentifier() and x not in _CONTROL and not x.startswith("branch_")]
    return ".".join(re.sub(r"_?\d+$", "", x) or x for x in found[-3:])


def user_name(t: Timeline, name: str) -> str:
    """Returns the user's name and line of an op of a compiled program, else its own name."""
    op = t.compiled.get(name)
    if op is None or not op.op_name:
        return plain_name(name)[:80]
    line = f", {op.source.rsplit('/', 1)[-1]}" if op.source else ""
    return f"{op.op_name.rsplit('/', 1)[-1]} ({name}{line})"


LaunchPlace = tuple[str, int, str, str, bool]
"""Around a launch: the framework's op, the index of its operands' shapes, the user's module or line, the backward node
or else the line or outer op of PyTorch, and whether the optimizer is around."""


class _Around:
    """What is around the call that launched each device op of a rank."""

    def __init__(self, t: Timeline, here: np.ndarray) -> None:
        self.t = t
        kind = t["kind"][here]
        device = here[on_stream(kind)]
        calls = here[kind == _RUNTIME]
        launching = calls[
            np.isin(t["correlation"][calls], t["correlation"][device]) & (t["correlation"][calls] >= 0)
        ]
        self.place: dict[int, LaunchPlace] = {}
        self._op: dict[int, int] = {}
        for lane in np.unique(t["lane"][launching]).tolist():
            mine = launching[t["lane"][launching] == lane]
            spans = here[np.isin(kind, (_HOST, _ANNOTATION)) & (t["lane"][here] == lane)]
            for call, chain in _chains(t, mine, spans):
                number = int(t["correlation"][call])
                self.place[number] = self._place(chain)
                self._op[number] = max((e for e in chain if int(t["kind"][e]) == _HOST), default=-1)

    def of(self, event: int) -> LaunchPlace:
        """Returns the place of a device op; empty if nothing launched it."""
        return self.place.get(int(self.t["correlation"][event]), ("", -1, "", "", False))

    def call(self, event: int) -> int:
        """Returns the innermost op of the framework around a device op's launch; −1 if there is none."""
        return self._op.get(int(self.t["correlation"][event]), -1)

    def _place(self, chain: list[int]) -> LaunchPlace:
        t = self.t
        op, shape, line, inside, node, updates = "", -1, "", "", "", False
        modules: list[str] = []
        for e in chain:
            name = t.names[int(t["name"][e])]
            if name.startswith("Optimizer.step"):
                updates = True
            elif name.startswith(_NODE):
                node = name.removeprefix(_NODE)
            elif int(t["kind"][e]) == _HOST:
                inside = inside or op
                op, shape = name, int(t["shape"][e])
            elif found := _MODULE.match(name):
                modules.append(found["name"])
            elif found := _LINE.match(name):
                place = f"{found['file']}:{found['line']} {found['function']}"
                line, inside = (line, place) if name.startswith("torch/") else (place, inside)
            elif (
                not name.startswith(("<", "torch/", "ProfilerStep", "PyTorch Profiler"))
                and ".py(" not in name
            ):
                modules.append(name)  # a range that the user marked
        return op, shape, ".".join(modules[-3:]) or line, node or inside, updates


def _chains(t: Timeline, calls: np.ndarray, spans: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Yields each call of a thread with the events around it, outermost first."""
    both = np.concatenate([spans, calls])
    is_call = np.arange(len(both)) >= len(spans)
    order = np.lexsort((is_call, -t["duration_ns"][both], t["start_ns"][both]))
    ends = t.end_ns
    stack: list[tuple[int, int]] = []
    for e, call, start, end in zip(
        both[order].tolist(),
        is_call[order].tolist(),
        t["start_ns"][both[order]].tolist(),
        ends[both[order]].tolist(),
        strict=True,
    ):
        while stack and stack[-1][1] <= start:
            stack.pop()
        if call:
            yield e, [x for x, until in stack if until >= end]
        else:
            stack.append((e, end))


def _launched(t: Timeline, kernel: str, place: LaunchPlace) -> Origin:
    op, shape, where, node, updates = place
    work = _work(kernel, op, updates)
    operands = t.shapes[shape] if shape >= 0 else ()
    widths = t.widths[shape] if shape >= 0 and t.widths else ()
    product = _product(op, operands)
    itemsize = max(widths, default=0)
    precision = precision_of(kernel) if work in _FLOPS else ""
    if 0 < itemsize < _BYTES.get(precision, 0):
        precision = ""  # the kernel's name has the precision in which it sums
    flops = -1 if work in _FLOPS else 0
    if work == "product" and product:
        flops = 2 * math.prod(product[2]) * product[0][-1]
    elif work in _FLOPS and shape >= 0 and t.flops:
        flops = t.flops[shape] or -1
    if work in _FLOPS and not precision:
        precision = _BY_BYTES.get(itemsize, "")
    known = bool(widths) and all(w or not s for w, s in zip(widths, operands, strict=True))
    read = sum(w * math.prod(s) for w, s in zip(widths, operands, strict=True) if s) if known else -1
    # An op writes at least as much as the result of its product; of other ops, only what they read is known.
    nbytes = read + itemsize * math.prod(product[2]) if known and product else read
    name = op or plain_name(kernel)[:60]
    return Origin(
        kind=f"{work} {precision}".strip() if work != "other" else "other",
        name=name,
        where=where or node,
        operands=operands,
        product=product,
        itemsize=itemsize,
        flops=flops,
        nbytes=nbytes if work == "product" else -1,
        precision=precision,
    )


def _work(kernel: str, op: str, updates: bool) -> KernelWork:
    """Returns the kind of work of a kernel that an op launches. A convolution may run as a product."""
    work = work_of(kernel)
    if updates and work not in _FLOPS:
        return "optimizer"
    if work == "product" and op.startswith("aten::") and work_of(op) in ("convolution", "attention"):
        return work_of(op)
    return work if work != "other" else work_of(op)


def _product(op: str, operands: Shapes) -> Shapes:
    """Returns the factors and the result of an op of PyTorch that is one matrix product; empty if it is not one.

    >>> _product("aten::addmm", ((5,), (2, 3), (3, 5)))
    ((2, 3), (3, 5), (2, 5))
    """
    places = _FACTORS.get(op)
    if places is None or len(operands) <= places[1]:
        return ()
    x, w = operands[places[0]], operands[places[1]]
    if len(x) < 2 or len(w) != len(x) or x[-1] != w[-2] or x[:-2] != w[:-2]:
        return ()
    return x, w, (*x[:-1], w[-1])
