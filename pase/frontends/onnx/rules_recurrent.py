"""Rules for ONNX's recurrent layers, which become loops over time, and for attention, which is one op."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.values import Value
from pase.frontends.onnx.rules import lowers, nothing
from pase.frontends.onnx.values import OnnxCall
from pase.ir import Tensor, functions
from pase.ops import loops, nests
from pase.ops.attention import attention
from pase.ops.composites import apply

__all__: list[str] = []

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@lowers("LSTM", "GRU", "RNN")
def _recurrent(c: OnnxCall) -> Sequence[Value | None]:
    """A recurrent layer as a loop over time. Gates are a separate dim.

    The product of the inputs with their weights is computed for all time steps at once, before the loop.
    """
    x, w, r = c.x(0), c.x(1), c.x(2)
    batch_first = bool(c.integer("layout"))
    gates, ways = _GATES[c.op], {"bidirectional": 2}.get(c.text("direction", "forward"), 1)
    if len(x.shape) != 3 or len(w.shape) != 3 or len(r.shape) != 3:
        raise c.fail(
            f"its inputs {list(x.shape)} and its weights {list(w.shape)} and {list(r.shape)} must have three dims each"
        )
    if batch_first:
        x = c.transpose(x, [1, 0, 2])
    steps, batch, width = x.shape
    hidden = r.shape[2]
    if w.shape != (ways, gates * hidden, width) or r.shape != (ways, gates * hidden, hidden) or not steps:
        raise c.fail(
            f"its weights {list(w.shape)} and {list(r.shape)} do not fit inputs {list(x.shape)} in {ways} directions"
        )
    bias = c.opt(3)
    if bias is not None and bias.shape != (ways, 2 * gates * hidden):
        raise c.fail(f"its bias {list(bias.shape)} does not fit {gates} gates of size {hidden}")
    many, last, cells = [], [], []
    for way in range(ways):
        wd = c.reshape(_direction(c, w, way), (gates, hidden, width))
        rd = c.reshape(_direction(c, r, way), (gates, hidden, hidden))
        entering = c.value(nests.contract(c.b, c.tensor(x), c.tensor(wd), ([2], [2])))
        if bias is not None:
            both = c.reshape(_direction(c, bias, way), (2, gates, hidden))
            (summed,) = nests.reduce(c.b, functions.SUM, [c.tensor(both)], [0], [both.dtype])
            entering = c.elementwise([entering, c.value(summed)], functions.ADD)
        states = [_state(c, i, way, (batch, hidden), x.dtype) for i in ((5, 6) if c.op == "LSTM" else (5,))]
        y, ends = _over_time(c, c.tensor(entering), c.tensor(rd), states, (steps, batch, hidden), way)
        many.append(c.reshape(y, (steps, 1, batch, hidden)))
        last.append(c.reshape(ends[0], (1, batch, hidden)))
        cells += [c.reshape(e, (1, batch, hidden)) for e in ends[1:]]
    out = _joined(c, many, 1)
    ends = [_joined(c, last, 0), *([_joined(c, cells, 0)] if cells else [])]
    if batch_first:
        return [c.transpose(out, [2, 0, 1, 3]), *(c.transpose(e, [1, 0, 2]) for e in ends)]
    return [out, *ends]


def _direction(c: OnnxCall, v: Value, way: int) -> Value:
    """The part of a value for one direction."""
    if v.shape[0] == 1:
        return v
    one = (1, *v.shape[1:])
    return c.value(nests.restrict(c.b, "slice", [c.tensor(v)], one, [i > 0 for i in range(len(one))]))


def _state(c: OnnxCall, i: int, way: int, shape: tuple[int, int], dtype: str) -> Tensor:
    """The initial state in input i."""
    given = c.opt(i)
    if given is None or given.tensor is None:  # zeros or a stored tensor, which is not trained
        return c.b.constant(shape, dtype)
    if c.integer("layout"):
        given = c.transpose(given, [1, 0, 2])
    return c.tensor(c.reshape(_direction(c, given, way), shape))


def _joined(c: OnnxCall, values: Sequence[Value], axis: int) -> Value:
    return values[0] if len(values) == 1 else c.value(nests.concat(c.b, c.tensors(*values), axis))


def _over_time(
    c: OnnxCall,
    entering: Tensor,
    recurrent: Tensor,
    states: Sequence[Tensor],
    shape: tuple[int, int, int],
    way: int,
) -> tuple[Value, list[Value]]:
    """(outputs of all time steps [s b h], last states). entering: [s b gates h]. recurrent: [gates h h]."""
    b, at = c.b, c.b.eqn
    steps = shape[0]
    b.eqn = at.its("const", way)
    weights = loops.loop_copy(b, recurrent, "loop_const")
    carried = []
    for k, s in enumerate(states):
        carried.append(b.carry(s, at.its("carry", way, k)))
    b.eqn = at.its("xs", way)
    entering = loops.loop_copy(b, entering, "loop_xs")
    b.eqn = at
    with b.region("loop", f"{at.path}.{way}.", times=steps):
        step = loops.unstack(b, entering)
        new = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[c.op](c, step, weights, carried)
        made = loops.stack(b, new[0], steps, shape)
        for t, n in zip(carried, new, strict=True):
            b.close_carry(t, n)
    b.eqn = at
    return c.value(made), [c.value(t) for t in carried]


def _gate(c: OnnxCall, gates: Tensor, k: int) -> Tensor:
    n, _, h = gates.shape
    one = (
        nests.restrict(c.b, "slice", [gates], (n, 1, h), [True, False, True])
        if gates.shape[1] != 1
        else gates
    )
    return nests.reshape(c.b, one, (n, h))


def _lstm(c: OnnxCall, x: Tensor, r: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    h, cell = states
    gates = apply(c.b, functions.ADD, x, nests.contract(c.b, h, r, ([1], [2])))
    enter, leave, forget, new = (_gate(c, gates, k) for k in range(4))
    enter, leave, forget = (apply(c.b, functions.SIGMOID, t) for t in (enter, leave, forget))
    kept = apply(c.b, functions.MUL, forget, cell)
    cell = apply(c.b, functions.ADD, kept, apply(c.b, functions.MUL, enter, apply(c.b, functions.TANH, new)))
    return [apply(c.b, functions.MUL, leave, apply(c.b, functions.TANH, cell)), cell]


def _gru(c: OnnxCall, x: Tensor, r: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    (h,) = states
    _, n, width = r.shape
    if c.integer("linear_before_reset"):
        back = nests.contract(c.b, h, r, ([1], [2]))
        update, reset, new = (_gate(c, back, k) for k in range(3))
        reset = apply(c.b, functions.SIGMOID, apply(c.b, functions.ADD, _gate(c, x, 1), reset))
        new = apply(c.b, functions.ADD, _gate(c, x, 2), apply(c.b, functions.MUL, reset, new))
    else:
        two = nests.restrict(c.b, "slice", [r], (2, n, width), [False, True, True])
        one = nests.reshape(
            c.b, nests.restrict(c.b, "slice", [r], (1, n, width), [False, True, True]), (n, width)
        )
        back = nests.contract(c.b, h, two, ([1], [2]))
        update, reset = (_gate(c, back, k) for k in range(2))
        reset = apply(c.b, functions.SIGMOID, apply(c.b, functions.ADD, _gate(c, x, 1), reset))
        again = nests.contract(c.b, apply(c.b, functions.MUL, reset, h), one, ([1], [1]))
        new = apply(c.b, functions.ADD, _gate(c, x, 2), again)
    update = apply(c.b, functions.SIGMOID, apply(c.b, functions.ADD, _gate(c, x, 0), update))
    new = apply(c.b, functions.TANH, new)
    kept = apply(c.b, functions.MUL, update, h)
    mixed = apply(c.b, functions.MUL, new, update, None, flops=2.0)  # with 1 - update
    return [apply(c.b, functions.ADD, mixed, kept)]


def _rnn(c: OnnxCall, x: Tensor, r: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    (h,) = states
    back = nests.contract(c.b, h, r, ([1], [2]))
    return [apply(c.b, functions.TANH, _gate(c, apply(c.b, functions.ADD, x, back), 0))]


# Attention.


_FIRST, _LAST = (0, 2, 1, 3), (0, 1, 2, 3)
"""The positions of batch, positions, heads and width among the dims, with heads before or after the positions."""


def _heads(c: OnnxCall, v: Value, n: int, order: Sequence[int]) -> Value:
    """A value [b s (h d)] or [b h s d] with four dims in this order. n: the number of heads."""
    if len(v.shape) == 4:
        return v
    if len(v.shape) != 3 or n < 1 or v.shape[2] % n:
        raise c.fail(f"its input {list(v.shape)} cannot be divided into {n} heads")
    apart = c.reshape(v, (*v.shape[:2], n, v.shape[2] // n))
    return c.transpose(apart, [0, 2, 1, 3]) if order == _FIRST else apart


def _attend(
    c: OnnxCall,
    qkv: Sequence[Value],
    order: Sequence[int],
    mask: Value | None,
    *,
    causal: bool,
    soft_cap: bool = False,
) -> Value:
    """Attention as one op, like the runtime's kernel.

    causal: applies only without a cache, because all positions of a cache are visible.
    """
    q, k, v = qkv
    (b, s, h, d), (of_b, t, groups, of_d) = ([x.shape[i] for i in order] for x in (q, k))
    if of_b != b or of_d != d or v.shape[:3] != k.shape[:3] or not groups or h % groups:
        raise c.fail(
            f"its queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} do not match"
        )
    biases = []
    if mask is not None and mask.elements > 1:
        if mask.shape[-1] < t and mask.shape[-1] != 1:  # positions that the mask does not cover are masked
            wide = (*mask.shape[:-1], t)
            kept = [i < len(wide) - 1 for i in range(len(wide))]
            mask = c.value(nests.restrict(c.b, "pad", [c.tensor(mask)], wide, kept))
        if c.broadcast(mask.shape, (b, h, s, t)) != (b, h, s, t):
            raise c.fail(f"its mask {list(mask.shape)} does not fit scores {[b, h, s, t]}")
        biases.append(c.tensor(c.reshape(mask, (1,) * (4 - len(mask.shape)) + tuple(mask.shape))))
    if math.prod(q.shape) * math.prod(v.shape) == 0:
        return nothing((*q.shape[:3], v.shape[3]), q.dtype)
    made = attention(
        c.b,
        c.tensor(q),
        c.tensor(k),
        c.tensor(v),
        biases,
        causal=causal and s == t,
        order=order,
        extra_flops=12.0 if soft_cap else 0.0,
    )
    return c.value(made)


def _merged(c: OnnxCall, out: Value, order: Sequence[int]) -> Value:
    """The value with its heads merged: [b s (h d)]."""
    b, s, h, d = (out.shape[i] for i in order)
    return c.reshape(c.transpose(out, [0, 2, 1, 3]) if order == _FIRST else out, (b, s, h * d))


def _heads_first(c: OnnxCall, v: Value, order: Sequence[int]) -> Value:
    """Keys or values in the order of dims of a cache. The transpose is made only if something reads it."""
    if order == _FIRST:
        return v
    shape = tuple(v.shape[i] for i in (0, 2, 1, 3))
    return c.later(shape, v.dtype, lambda: nests.transpose(c.b, c.tensor(v), [0, 2, 1, 3]))


def _grown(c: OnnxCall, past: Value | None, new: Value) -> Value:
    """The cache with the new keys or values appended."""
    if past is None or not past.elements:
        return new
    if len(past.shape) != 4 or (*past.shape[:2], past.shape[3]) != (*new.shape[:2], new.shape[3]):
        raise c.fail(f"its cache {list(past.shape)} does not fit new keys or values {list(new.shape)}")
    return c.value(nests.concat(c.b, c.tensors(past, new), 2))


def _order(parts: Sequence[Value], pasts: Sequence[Value | None]) -> Sequence[int]:
    """The order of dims: heads stay after positions if they are packed in one dim and there is no cache."""
    apart = any(len(p.shape) == 4 for p in parts) or any(p is not None and p.elements for p in pasts)
    return _FIRST if apart else _LAST


@lowers("Attention")
def _attention(c: OnnxCall) -> Sequence[Value | None]:
    parts, pasts = [c.x(i) for i in range(3)], (c.opt(4), c.opt(5))
    order = _order(parts, pasts)
    counts = [c.integer("q_num_heads"), *[c.integer("kv_num_heads")] * 2]
    q, k, v = (_heads(c, p, n, order) for p, n in zip(parts, counts, strict=True))
    k, v = _grown(c, pasts[0], k), _grown(c, pasts[1], v)
    causal, soft_cap = c.integer("is_causal") == 1, c.real("softcap") != 0.0
    out = _attend(c, (q, k, v), order, c.opt(3), causal=causal, soft_cap=soft_cap)
    if len(parts[0].shape) == 3:
        out = _merged(c, out, order)
    b, s, h, _ = (q.shape[i] for i in order)
    scores = c.missing((b, h, s, k.shape[order[1]]), q.dtype, "its scores")
    return [out, _heads_first(c, k, order), _heads_first(c, v, order), scores]


@lowers("com.microsoft:MultiHeadAttention", "com.microsoft:GroupQueryAttention")
def _contrib_attention(c: OnnxCall) -> Sequence[Value | None]:
    """onnxruntime's attention on queries, keys and values [b s (h d)], which may all be packed in the first input."""
    n = c.integer("num_heads", 1)
    groups = c.integer("kv_num_heads", n)
    parts = [c.x(0), c.opt(1), c.opt(2)]
    if parts[1] is None:  # packed: queries, then keys, then values
        b, s, w = c.x(0).shape
        d = w // (n + 2 * groups)
        sizes = (n * d, groups * d, groups * d)
        parts = [
            c.value(nests.restrict(c.b, "split", [c.tensor(c.x(0))], (b, s, size), [True, True, False]))
            for size in sizes
        ]
    grouped = c.op == "GroupQueryAttention"
    pasts = (c.opt(3), c.opt(4)) if grouped else (c.opt(6), c.opt(7))
    given = [p for p in parts if p is not None]
    order = _order(given, pasts)
    q, k, v = (_heads(c, p, m, order) for p, m in zip(given, (n, groups, groups), strict=True))
    k, v = _grown(c, pasts[0], k), _grown(c, pasts[1], v)
    mask = None if grouped else c.opt(5)
    out = _attend(c, (q, k, v), order, mask, causal=grouped or c.integer("unidirectional") == 1)
    return [_merged(c, out, order), _heads_first(c, k, order), _heads_first(c, v, order)]


@lowers("RotaryEmbedding", "com.microsoft:RotaryEmbedding")
def _rotary(c: OnnxCall) -> Value:
    """Rotates pairs of elements of a head. A head may not be split."""
    x = c.x(0)
    heads = c.integer("num_heads")
    cut = x
    if len(x.shape) == 3:
        tables = [v for v in (c.opt(1), c.opt(2), c.opt(3)) if v is not None and len(v.shape) > 1]
        d = 2 * tables[0].shape[-1] if tables and not heads else x.shape[2] // max(heads, 1)
        if not d or x.shape[2] % d:
            raise c.fail(f"its input {list(x.shape)} cannot be divided into heads of size {d}")
        cut = c.reshape(x, (*x.shape[:2], x.shape[2] // d, d))
    kept = [i < len(cut.shape) - 1 for i in range(len(cut.shape))]
    turned = c.value(nests.restrict(c.b, "rotate", [c.tensor(cut)], cut.shape, kept))
    return c.reshape(c.elementwise([turned, None], functions.MUL, flops=5.0), x.shape)
