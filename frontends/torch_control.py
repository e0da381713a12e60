"""PyTorch's higher-order ops: loops, branches and attention with a score function of the user's.

Bodies are graphs of their own, lowered once: a loop's times its trip count, a branch's by its chance, as those of JAX
are (``jax_control``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pase.frontends.registry import Control, lowers_bodies
from pase.frontends.torch_types import FxNode
from pase.frontends.torch_values import TorchCall, TorchOperand, dtype_of
from pase.frontends.values import Value
from pase.ir import Place, Tensor
from pase.ir.sizes import is_one
from pase.ops import GraphBuilder, branches, loops
from pase.ops.attention import attention
from pase.registry import Registry

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from pase.frontends.torch_lower import TorchLowering

__all__ = ["CONTROL"]

CONTROL: Registry[Control] = Registry("higher-order op of PyTorch")
"""Name -> how a call of it is lowered: (lowering, node, its path) -> its values."""

Results = list[Value | None]


@lowers_bodies(CONTROL, "scan", listed="loop")
def scan(low: TorchLowering, n: FxNode, path: str) -> Results:
    """``scan(body, init, xs, others)``: the body once, times the length of xs."""
    body, init, xs, others = n.args
    return _loop(low, n, path, _graph(n, body), (init, xs, others))


@lowers_bodies(CONTROL, "map_impl", listed="loop")
def map_(low: TorchLowering, n: FxNode, path: str) -> Results:
    """``map(body, xs, others)``: a scan that carries nothing."""
    body, xs, others = n.args
    return _loop(low, n, path, _graph(n, body), ((), xs, others))


def _loop(
    low: TorchLowering, n: FxNode, path: str, body: GraphModule, given: Sequence[Sequence[FxNode]]
) -> Results:
    """given: what is carried, what is read one slice a turn, and what each turn reads whole."""
    b, at, source = low.b, Place(path), low.b.source
    c = _call(low, n)
    init, xs, others = ([_tensor(c, low, v) for v in part] for part in given)
    if not xs:
        raise c.fail("it has nothing to go along: pass a tensor whose first dim is the number of turns")
    length = given[1][0].meta["val"].shape[0]
    names = [m for m in body.graph.nodes if m.op == "placeholder"]
    inner = low.within()
    settled = [_settled(b, t, at, k) for k, t in enumerate(others)]
    carried = [b.carry(t, at.its("carry", k)) for k, t in enumerate(init)]
    stacks = []
    for k, t in enumerate(xs):
        b.eqn = at.its("xs", k)
        stacks.append(loops.settle(b, t, "loop_xs") if t.role == "activation" else t)
    with b.region("loop", f"{path}.", times=length):
        slices = []
        for k, t in enumerate(stacks):
            b.eqn = at.its("x", k)
            slices.append(loops.unstack(b, t))
        for name, t in zip(names, (*carried, *slices, *settled), strict=True):
            inner.env[name] = c.value(t)
        made = [_tensor(c, inner, m) for m in _lowered(inner, body, f"{path}.")]
        b.source = source
        stacked = []
        for k, t in enumerate(made[len(carried) :]):
            b.eqn = at.its("y", k)
            stacked.append(loops.stack(b, t, length, (length, *t.shape)))
        for before, after in zip(carried, made, strict=False):
            if before.name != after.name:
                b.close_carry(before, after)
    return [c.value(t) for t in (*carried, *stacked)]


@lowers_bodies(CONTROL, "cond", listed="branches")
def cond(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Both branches are lowered; the more expensive one is priced as if it were taken every time."""
    b, at, source = low.b, Place(path), low.b.source
    c = _call(low, n)
    index, *bodies = n.args[:3]
    graphs = [_graph(n, g) for g in bodies]
    likely = branches.chances([_flops(low, g) for g in graphs])
    b.remarks.append(
        f"of the 2 branches of the cond at {source or 'an unknown line'}, the one for "
        f"{'true' if likely[0] == 1.0 else 'false'}, the more expensive one, is priced as if it were taken every time"
    )
    asked = _value(low, index)
    made: list[list[Tensor]] = []
    for k, (graph, chance) in enumerate(zip(graphs, likely, strict=True)):
        inner = low.within()
        names = (m for m in graph.graph.nodes if m.op == "placeholder")
        inner.env.update({name: low.env[m] for name, m in zip(names, n.args[3], strict=True)})
        with b.region("branch", f"{path}.{k}.", chance=chance):
            outs = _lowered(inner, graph, f"{path}.{k}.")
            b.source = source
            results = []
            for j, m in enumerate(outs):
                b.eqn = at.its("out", k, j)
                results.append(branches.leave(b, _tensor(c, inner, m)))
            made.append(results)
    b.eqn = at
    return [c.value(branches.meet(b, c.tensor(asked), same)) for same in zip(*made, strict=True)]


@lowers_bodies(CONTROL, "while_loop", "while_loop_with_checkpoint", listed="loop")
def while_loop(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Refused: how often it turns is known only at run time, and PyTorch's backward would keep every turn."""
    raise _call(low, n).fail(
        "how often it turns depends on the data, so neither time nor memory of a step is known: use a Python loop or "
        "torch's scan over a number of turns that is known beforehand"
    )


@lowers_bodies(CONTROL, "flex_attention", listed="attention")
def flex(low: TorchLowering, n: FxNode, path: str) -> Results:
    """Attention whose scores a function of the user's changes, number by number. A block mask that is causal is priced
    as such; of any other one which blocks it leaves out is known only at run time: all are priced."""
    q, k, v, score, mask, _, _, *held = n.args
    c = _call(low, n)
    for m in (m for part in (mask[2:-1], *held) for m in part if hasattr(m, "op")):
        if _from_data(low, m):
            raise c.fail(
                f"its score function or its mask reads a tensor {list(m.meta['val'].shape)} that depends on the batch "
                f"or on a parameter: pase reads only positions and constants there; give scaled_dot_product_attention "
                f"a mask"
            )
    numbers = sum(m.op == "call_function" for m in _graph(n, score).graph.nodes)
    qs, ks, vs = (c.tensor(_value(low, m)) for m in (q, k, v))
    causal = _is_causal(_graph(n, mask[-1]))
    out = attention(low.b, qs, ks, vs, causal=causal, order=(0, 2, 1, 3), extra_flops=float(numbers))
    rest = n.meta["val"][1:]
    return [c.value(out), *(None if t is None else c.nothing(t.shape, dtype_of(t.dtype)) for t in rest)]


def _from_data(low: TorchLowering, m: FxNode) -> bool:
    """Does a node depend on a parameter or on the batch?"""
    seen, todo = {m}, [m]
    while todo:
        at = todo.pop()
        if at.op == "placeholder" and _tensor(_call(low, m), low, at).role != "constant":
            return True
        todo += (new := set(at.all_input_nodes) - seen)
        seen |= new
    return False


def _is_causal(graph: GraphModule) -> bool:
    """Is a mask's function ``query position >= key position``, and nothing more?"""
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
    """The body that an operand names."""
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


def _settled(b: GraphBuilder, t: Tensor, at: Place, k: int) -> Tensor:
    """What a body reads whole. Its layout is fixed once, before the loop."""
    if t.role == "constant" or all(map(is_one, t.shape)):
        return t
    b.eqn = at.its("const", k)
    return loops.settle(b, t, "loop_const")


def _lowered(inner: TorchLowering, body: GraphModule, prefix: str) -> list[FxNode]:
    """Lowers a body whose operands are set; the nodes of its results."""
    inner.constants(body)
    nodes: list[FxNode] = list(body.graph.nodes)
    inner.nodes([m for m in nodes if m.op != "output"], prefix)
    (results,) = next(m for m in nodes if m.op == "output").args
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _flops(low: TorchLowering, body: GraphModule) -> float:
    """FLOPs of a body alone."""
    inner = replace(low.within(), b=GraphBuilder(name=low.model))
    for m in body.graph.nodes:
        if m.op == "placeholder":
            inner.leaf(m, partial(inner.b.input, m.name))
    _lowered(inner, body, "")
    return loops.body_flops(inner.b)
