"""Lowers PyTorch's higher-order ops: loops, branches, and attention with a score function written by the user.

Each body is lowered once. The body of a loop counts trip-count times, the body of a branch by the branch's probability,
as for JAX (``pase.frontends.jax.control``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pase.frontends.common.values import Value
from pase.frontends.registry import Control, lowers_bodies
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchCall, TorchOperand, TorchScope, dtype_of
from pase.ir import Place, Tensor
from pase.ir.sizes import is_one
from pase.ops import GraphBuilder, branches, loops
from pase.ops.attention import attention
from pase.registry import Registry

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from pase.frontends.torch.lower import TorchLowering

__all__ = ["CONTROL", "LOOPS", "flex_operands", "loop_operands", "trip_count"]

CONTROL: Registry[Control] = Registry("higher-order op of PyTorch")
"""Name -> how a call of it is lowered: (lowering, node, its path) -> its values."""

LOOPS = ("scan", "map_impl")
"""Loops whose trip count is known."""

Results = list[Value | None]


def loop_operands(n: FxNode) -> tuple[FxNode, Sequence[FxNode], Sequence[FxNode], Sequence[FxNode]]:
    """(body, carried values, values read one slice per iteration, values that each iteration reads whole) of a loop.

    The loop is ``scan(body, init, xs, others)``, or ``map(body, xs, others)``, a scan that carries nothing.
    """
    body, *init, xs, others = n.args
    return body, (init[0] if init else ()), xs, others


def trip_count(n: FxNode) -> int:
    """The number of iterations of a loop."""
    return int(loop_operands(n)[2][0].meta["val"].shape[0])


@lowers_bodies(CONTROL, *LOOPS, listed="loop")
def loop(low: TorchLowering, n: FxNode, path: str) -> Results:
    """The body, lowered once, in a loop over the first dim of xs."""
    b, at, source = low.b, Place(path), low.b.source
    c = _call(low, n)
    named, *given = loop_operands(n)
    init, xs, others = ([_tensor(c, low, v) for v in part] for part in given)
    if not xs:
        raise c.fail(
            "it has no tensor to loop over", fix="pass a tensor whose first dim is the number of iterations"
        )
    length = trip_count(n)
    copies = [_loop_copy(b, t, at, k) for k, t in enumerate(others)]
    carried = [b.carry(t, at.its("carry", k)) for k, t in enumerate(init)]
    stacks = []
    for k, t in enumerate(xs):
        b.eqn = at.its("xs", k)
        stacks.append(loops.loop_copy(b, t, "loop_xs") if t.role == "activation" else t)
    body = _LoweredBody.of(low, _graph(n, named))
    with b.region("loop", f"{path}.", times=length):
        slices = []
        for k, t in enumerate(stacks):
            b.eqn = at.its("x", k)
            slices.append(loops.unstack(b, t))
        body.lower(path, [c.value(t) for t in (*carried, *slices, *copies)])
        low.inner[path] = body.scope
        b.source = source
        made = []
        for k, m in enumerate(body.scope.results):
            b.eqn = at.its("y", k)
            t = _tensor(c, body.low, m)
            made.append(t if k < len(carried) else loops.stack(b, t, length, (length, *t.shape)))
        for before, after in zip(carried, made, strict=False):
            if before.name != after.name:
                b.close_carry(before, after)
    return [c.value(t) for t in (*carried, *made[len(carried) :])]


@lowers_bodies(CONTROL, "cond", listed="branches")
def cond(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Both branches. The more expensive one is priced as if it were taken every time."""
    b, at, source, line = low.b, Place(path), low.b.source, low.b.line
    c = _call(low, n)
    index, *bodies = n.args[:3]
    graphs = [_graph(n, g) for g in bodies]
    likely = branches.chances([_flops(low, g) for g in graphs])
    b.remark(
        "assumed",
        f"of the 2 branches of the cond at {line}, the one for "
        f"{'true' if likely[0] == 1.0 else 'false'}, the more expensive one, is priced as if it were taken every time",
    )
    asked = _value(low, index)
    made: list[list[Tensor]] = []
    for k, (graph, chance) in enumerate(zip(graphs, likely, strict=True)):
        body = _LoweredBody.of(low, graph)
        with b.region("branch", f"{path}.{k}.", chance=chance):
            body.lower(f"{path}.{k}", [low.env[m] for m in n.args[3]], n.args[3])
            low.inner[f"{path}.{k}"] = body.scope
            b.source = source
            results = []
            for j, m in enumerate(body.scope.results):
                b.eqn = at.its("out", k, j)
                results.append(branches.leave(b, _tensor(c, body.low, m)))
            made.append(results)
    b.eqn = at
    return [c.value(branches.meet(b, c.tensor(asked), same)) for same in zip(*made, strict=True)]


@lowers_bodies(CONTROL, "while_loop", "while_loop_with_checkpoint", listed="loop")
def while_loop(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Refused: the trip count is known only at run time, and PyTorch's backward keeps residuals of every iteration."""
    raise _call(low, n).fail(
        "its trip count depends on the data, so neither the time nor the memory of a step is known",
        fix="use a Python loop or torch's scan with a known number of iterations",
    )


@lowers_bodies(CONTROL, "flex_attention", listed="attention")
def flex(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Attention whose scores are changed elementwise by a function of the user's.

    A causal block mask is priced as causal attention. For any other mask, all blocks are priced, because the blocks
    that it leaves out are known only at run time.
    """
    q, k, v, score, mask, _, _, *held = n.args
    c = _call(low, n)
    for m in (m for part in (mask[2:-1], *held) for m in part if hasattr(m, "op")):
        if _from_data(low, m):
            raise c.fail(
                f"its score function or mask reads a tensor of shape {list(m.meta['val'].shape)} that depends on the "
                f"batch or on a parameter, but may read only positions and constants",
                fix="use scaled_dot_product_attention with a mask",
            )
    numbers = sum(m.op == "call_function" for m in _graph(n, score).graph.nodes)
    qs, ks, vs = (c.tensor(_value(low, m)) for m in (q, k, v))
    causal = _is_causal(_graph(n, mask[-1]))
    out = attention(low.b, qs, ks, vs, causal=causal, order=(0, 2, 1, 3), extra_flops=float(numbers))
    rest = n.meta["val"][1:]
    missing = "the logarithms of sums, or maxima, of its scores"
    return [
        c.value(out),
        *(None if t is None else c.missing(t.shape, dtype_of(t.dtype), missing) for t in rest),
    ]


def flex_operands(n: FxNode) -> dict[str, TorchOperand]:
    """The operands of a flex_attention by name.

    score, mask: the graphs of the functions of a position. Their last operands are score_reads and mask_reads.
    """
    q, k, v, score, mask, scale, _, score_reads, mask_reads = n.args
    return {
        "query": q,
        "key": k,
        "value": v,
        "scale": scale,
        "score": _graph(n, score),
        "mask": _graph(n, mask[-1]),
        "score_reads": score_reads,
        "mask_reads": mask_reads,
    }


def _from_data(low: TorchLowering, m: FxNode) -> bool:
    """Whether a node depends on a parameter or on the batch."""
    seen, todo = {m}, [m]
    while todo:
        at = todo.pop()
        if at.op == "placeholder" and _tensor(_call(low, m), low, at).role != "constant":
            return True
        todo += (new := set(at.all_input_nodes) - seen)
        seen |= new
    return False


def _is_causal(graph: GraphModule) -> bool:
    """Whether a mask's function is exactly ``query position >= key position``."""
    names = [m for m in graph.graph.nodes if m.op == "placeholder"]
    calls = [m for m in graph.graph.nodes if m.op == "call_function"]
    (results,) = next(m for m in graph.graph.nodes if m.op == "output").args
    (result,) = results if isinstance(results, (list, tuple)) else (results,)
    if len(calls) != 1 or result is not calls[0] or len(names) < 4:
        return False
    op = getattr(calls[0].target, "_schema", None)
    sides = {"aten::ge": (names[2], names[3]), "aten::le": (names[3], names[2])}
    return op is not None and sides.get(op.name) == tuple(calls[0].args)


def _graph(n: FxNode, named: FxNode) -> GraphModule:
    """The graph of the body that an operand names."""
    found: TorchOperand = n.graph.owning_module
    return getattr(found, named.target)


def _call(low: TorchLowering, n: FxNode) -> TorchCall:
    return TorchCall(low=low, op=str(n.target), given={}, outs=[], place=low.place(n))


def _value(low: TorchLowering, m: FxNode) -> Value:
    found = low.env[m]
    assert isinstance(found, Value), m
    return found


def _tensor(c: TorchCall, low: TorchLowering, m: FxNode) -> Tensor:
    return c.tensor(_value(low, m))


def _loop_copy(b: GraphBuilder, t: Tensor, at: Place, k: int) -> Tensor:
    """A tensor that each iteration reads whole. Its layout is fixed once, before the loop."""
    if t.role == "constant" or all(map(is_one, t.shape)):
        return t
    b.eqn = at.its("const", k)
    return loops.loop_copy(b, t, "loop_const")


@dataclass(frozen=True, kw_only=True)
class _LoweredBody:
    """A body that is about to be lowered.

    Its nodes are a copy: two calls of one body need nodes of their own, because each call has its own place.
    """

    low: TorchLowering
    scope: TorchScope

    @staticmethod
    def of(around: TorchLowering, body: GraphModule) -> _LoweredBody:
        from torch.fx import Graph

        graph = Graph(owning_module=body)
        results = graph.graph_copy(body.graph, {})
        low = around.within()
        scope = TorchScope(
            nodes=list(graph.nodes),
            values=low.env,
            inner=low.inner,
            module=body,
            names=[m for m in graph.nodes if m.op == "placeholder"],
            results=list(results if isinstance(results, (list, tuple)) else [results]),  # type: ignore[arg-type, list-item]
        )
        return _LoweredBody(low=low, scope=scope)

    def lower(
        self, path: str, given: Sequence[Value | list[Value | None]], outer: Sequence[FxNode] = ()
    ) -> None:
        """Lower the body. given: the values of its placeholders. outer: the outer nodes that it reads unchanged."""
        scope = self.scope
        self.low.env.update(zip(scope.names, given, strict=True))
        scope.leaves.update(zip(scope.names, outer, strict=False))
        self.low.constants(scope.module, scope.nodes)
        self.low.nodes(scope.nodes, f"{path}.")


def _flops(low: TorchLowering, graph: GraphModule) -> float:
    """The FLOPs of a body."""
    body = _LoweredBody.of(replace(low, b=GraphBuilder(name=low.model, precision=low.b.precision)), graph)
    for m in body.scope.names:
        body.low.leaf(m, partial(body.low.b.input, m.name))
    body.lower("", [body.low.env[m] for m in body.scope.names])
    return loops.body_flops(body.low.b)
