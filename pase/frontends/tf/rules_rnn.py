"""Rules for cuDNN's fused recurrent layers, which Keras uses if it finds a GPU. Only the batch may be split."""

from __future__ import annotations

from collections.abc import Sequence

from pase.frontends.tf.rules import lowers
from pase.frontends.tf.values import Absent, TfCall, TfResult
from pase.ir import AccessMap, Tensor
from pase.ops import Read, Write
from pase.ops.builder import Dims

__all__: list[str] = []

_GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


@lowers("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")
def _cudnn(c: TfCall) -> Sequence[TfResult]:
    """A recurrent layer: 2·gates·(in + hidden)·hidden FLOPs per time step.

    The weights are packed into one vector, which is replicated on every device.
    """
    x, h = c.rank(0, 3), c.rank(1, 3)
    gates = _GATES.get(c.text("rnn_mode", "lstm"))
    if gates is None:
        raise c.fail(f"its rnn_mode '{c.text('rnn_mode')[:20]}' is not one of {', '.join(_GATES)}")
    time_major = c.flag("time_major", True)
    steps, batch = (x[0], x[1]) if time_major else (x[1], x[0])
    ways = 2 if c.text("direction") == "bidirectional" else 1
    if h[0] % ways or h[1] != batch:
        raise c.fail(f"its state of shape {h} does not fit an input of shape {x}")
    hidden = h[2]
    wide = [x[2]] + [ways * hidden] * (h[0] // ways - 1)
    flops = sum(2.0 * gates * ways * (n + hidden) * hidden * steps for n in wide)
    dims: Dims = {"b": (batch, "parallel")} if batch != 1 else {}

    def walk(shape: Sequence[int], at: int | None, prefix: str) -> AccessMap:
        out: list[tuple[str, ...]] = []
        for i, s in enumerate(shape):
            name = "b" if i == at else f"{prefix}{i}"
            out.append(() if s == 1 else (name,))
            if s != 1 and name != "b":
                dims[name] = (s, "replicated")
        return AccessMap.of(*out)

    reads = []
    for k in range(len(c.ins[:4])):
        t: Tensor = c.x(k)
        where = (1 if time_major else 0) if k == 0 else 1 if k < 3 else None
        if c.known(k) is None and t.shape:
            reads.append(Read(t, walk(c.shape_of(k), where, f"r{k}_")))
    shape = c.shape([*x[:2], ways * hidden])
    outs = [(shape, 1 if time_major else 0), (h, 1)] + ([(h, 1)] if gates == 4 else [])
    writes = [Write(s, c.dtype(0), walk(s, at, f"w{k}_")) for k, (s, at) in enumerate(outs)]
    over = [d for d in dims if d == "b"]
    made = c.b.nest(c.node.op, "opaque", reads, writes, dims, flops=flops, over=over)
    state: TfResult = made[2] if gates == 4 else Absent("the cell state of a layer that has none")
    return [made[0], made[1], state, *[Absent("a residual for cuDNN's own gradient")] * 2]
