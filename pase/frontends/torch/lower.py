"""Lowers an exported PyTorch graph node by node. PyTorch itself decomposes the ops that have no rule."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.registry import Unknown, UnknownOp
from pase.frontends.torch.control import CONTROL
from pase.frontends.torch.dtypes import check_dtypes
from pase.frontends.torch.export.functional import NO_GRADIENT
from pase.frontends.torch.export.module import STEP_FILE
from pase.frontends.torch.reasons import of_pytorch
from pase.frontends.torch.rules import RULES
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import (
    TorchCall,
    TorchOperand,
    TorchScope,
    arguments,
    dtype_of,
    one_kernel,
    op_name,
    specs_of,
)
from pase.frontends.torch.written import WRITTEN
from pase.ir import Place, SourceLine, Tensor
from pase.ir.places import NOWHERE
from pase.ops import GraphBuilder, nests
from pase.pytree import Tree

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.fx import Graph, GraphModule

__all__ = ["TorchLowering", "contents_of", "live", "place_of", "reads_op", "source_of"]

_MOST_DEPTH = 4
"""How deeply decompositions and loop or branch bodies may be nested before an op counts as unknown."""
_IGNORED = frozenset({"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"})
_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7}), in ([^\n]{1,80})')


def reads_op(name: str) -> bool:
    """Whether the op has a rule or needs none."""
    return name in RULES or name in _IGNORED


def live(graph: Graph, wanted: Sequence[str]) -> list[FxNode]:
    """The nodes that the named nodes depend on, in order."""
    nodes = list(graph.nodes)
    needed = set(wanted)
    for n in reversed(nodes):
        if n.name in needed:
            needed.update(m.name for m in n.all_input_nodes)
    return [n for n in nodes if n.name in needed and n.op not in ("output",)]


def source_of(node: FxNode) -> SourceLine:
    """The user's line that made a node, and the layer that the node belongs to."""
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if f[0] != STEP_FILE]
    own = [f for f in frames if not of_pytorch(f[0])] or [f for f in frames if not f[0].startswith("<")]
    if not own:
        return NOWHERE
    return SourceLine(f"{own[-1][0]}:{own[-1][1]}", layer_of(node) or own[-1][2])


def layer_of(node: FxNode) -> str:
    """The path of the module that the node belongs to; "" if that is the whole model."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return paths[-1].removeprefix("module").removeprefix(".") if paths else ""


def place_of(node: FxNode, model: str, at: str) -> str:
    """Names an op for messages: model, op, layer and the user's line. at: the user's line, or ""."""
    layer = layer_of(node)
    return f"{model}: {node.target}" + (f" in '{layer}'" if layer else "") + (f" at {at}" if at else "")


@dataclass
class TorchLowering:
    """The state of a graph's lowering.

    env: node -> the values that it was lowered to. inner: path of an op -> its decomposition or its body. depth: how
    many decompositions and bodies this graph is nested in. folds: whether numbers that are known without data become
    part of the ops that read them; otherwise the graph has them as constants (``FullGraph``).
    """

    b: GraphBuilder
    model: str
    unknown: Unknown
    env: dict[FxNode, Value | list[Value | None]] = field(default_factory=dict)
    inner: dict[str, TorchScope] = field(default_factory=dict)
    depth: int = 0
    folds: bool = True

    def leaf(self, node: FxNode, make: Callable[[tuple[int, ...], str], Tensor]) -> Value:
        """The value of a placeholder. Its tensor is made when something first reads it."""
        t = node.meta["val"]
        shape, dtype = tuple(t.shape), dtype_of(t.dtype)
        v = Value(shape=shape, dtype=dtype, make=lambda: make(shape, dtype))
        self.env[node] = v
        return v

    def nodes(self, nodes: Sequence[FxNode], prefix: str = "") -> None:
        for i, n in enumerate(nodes):
            if n.op == "call_function":
                self.node(n, f"{prefix}{i}")

    def node(self, n: FxNode, path: str) -> None:
        if n.target is operator.getitem:
            found = self.env[n.args[0]]
            made = found[n.args[1]] if isinstance(found, list) else found
            if made is None:
                raise PaseError(
                    f"its result {n.args[1]} is used, but the op's rule does not compute it",
                    where=place_of(n.args[0], self.model, source_of(n.args[0]).place),
                )
            self.env[n] = made
            return
        source = self.b.source if self.depth else source_of(n)
        self.b.source, self.b.eqn = replace(source, call=one_kernel(n)), Place(path)
        unwatched = NO_GRADIENT in (n.meta.get("custom") or {})
        with self.b.without_gradient() if unwatched else contextlib.nullcontext():
            self.env[n] = self.values(n, path)

    def place(self, n: FxNode) -> str:
        return place_of(n, self.model, self.b.source.place)

    def values(self, n: FxNode, path: str) -> Value | list[Value | None]:
        """The values that a node makes: by its rule, else by its decomposition, else unsplit if the user allows it."""
        name = op_name(n)
        if name in CONTROL:
            return CONTROL[name].lower(self, n, path)
        if name in _IGNORED:
            return []
        check_dtypes(n, self.place(n))
        if (inner := self.written(n)) is not None:
            return self.inlined(n, inner, path)
        if name not in RULES:
            return self.without_rule(n, path)
        if not self.folds:
            self.b.tell((name, _plain(n)))
        given = {k: self.operand(v) for k, v in arguments(n.target, n.args, n.kwargs).items()}
        place = self.place(n)
        c = TorchCall(low=self, op=name, given=given, outs=specs_of(n.meta["val"], place), place=place)
        try:
            made = RULES[name](c)
        except PaseError:
            raise
        except (ValueError, IndexError, TypeError, ZeroDivisionError, KeyError) as e:
            raise c.fail(f"its operands do not match its rule: {e}") from e
        return self.checked(c, made, isinstance(n.meta["val"], (tuple, list)))

    def checked(
        self, c: TorchCall, made: Value | Sequence[Value | None], several: bool
    ) -> Value | list[Value | None]:
        """The rule's results, after a check against the shapes that PyTorch found."""
        found: list[Value | None] = [made] if isinstance(made, Value) else list(made)
        for v, spec in zip(found, c.outs, strict=False):
            if v is not None and spec is not None and v.shape != spec[0]:
                raise c.fail(f"pase's rule gives shape {list(v.shape)}, but PyTorch gives {list(spec[0])}")
        return found if several else (found[0] or c.nothing(*c.out()))

    def operand(self, v: Any) -> Any:
        import torch

        if isinstance(v, torch.fx.Node):
            return self.env[v]
        return [self.operand(x) for x in v] if isinstance(v, (list, tuple)) else v

    # Ops without a rule.

    def without_rule(self, n: FxNode, path: str) -> Value | list[Value | None]:
        place = self.place(n)
        if op_name(n) == "_local_scalar_dense":
            raise PaseError(
                "the program goes on with the value of a tensor as a number of Python (.item(), .tolist(), "
                "float(tensor)), which does not exist before the model runs",
                where=place,
                fix="compute with the tensor itself: tensor.detach() for tensor.item()",
            )
        inner = _decomposed(n) if self.depth < _MOST_DEPTH else None
        if inner is not None:
            return self.inlined(n, inner, path)
        specs_of(n.meta["val"], place)  # refuses a size that depends on the data
        if self.unknown == "replicate":
            self.b.remark_unknown(str(n.target))
            return self.replicated(n)
        raise UnknownOp.in_frontend(
            "pase has no rule for this op, and PyTorch has no decomposition of it",
            where=place,
            rules="frontends/torch/rules*.py",
        )

    def written(self, n: FxNode) -> GraphModule | None:
        """The graph of other ops that the op is rewritten as (``written``); None if it is not rewritten."""
        found = WRITTEN.get(str(n.target).removeprefix("aten."))
        try:
            how = None if found is None else found(n)
        except PaseError as e:
            raise PaseError(e.what, where=self.place(n), fix=e.fix) from e
        return None if how is None else _traced(n, how)

    def within(self) -> TorchLowering:
        """A lowering for the nodes of a decomposed op or of a body."""
        return TorchLowering(
            b=self.b, model=self.model, unknown=self.unknown, depth=self.depth + 1, folds=self.folds
        )

    def constants(self, module: GraphModule | None, nodes: Iterable[FxNode]) -> None:
        """Add the tensors that a graph itself holds. They count as numbers that belong to the ops that read them."""
        for m in nodes:
            t: TorchOperand = getattr(module, m.target) if m.op == "get_attr" else None
            if hasattr(t, "dtype"):  # otherwise it is the body of a loop or a branch
                shape, dtype = tuple(t.shape), dtype_of(t.dtype)
                make = None if self.folds else partial(self.b.constant, shape, dtype, contents=contents_of(t))
                note = ("filled",) if self.folds else ()
                self.env[m] = Value(shape=shape, dtype=dtype, make=make, foldable=self.folds, note=note)

    def inlined(self, n: FxNode, inner: GraphModule, path: str) -> Value | list[Value | None]:
        low = self.within()
        leaves = [m for m in inner.graph.nodes if m.op == "placeholder"]
        for leaf, outer in zip(leaves, n.all_input_nodes, strict=True):
            low.env[leaf] = self.env[outer]
        (out,) = next(m for m in inner.graph.nodes if m.op == "output").args
        several = isinstance(out, (tuple, list))
        results = list(out) if several else [out]
        low.constants(inner, inner.graph.nodes)
        nodes = live(inner.graph, [r.name for r in results if r is not None])
        self.inner[path] = TorchScope(
            nodes=nodes,
            values=low.env,
            leaves=dict(zip(leaves, n.all_input_nodes, strict=True)),
            inner=low.inner,
            module=inner,
            results=results,
        )
        low.nodes(nodes, f"{path}.")
        made = [None if r is None else low.env[r] for r in results]
        return made if several else made[0]  # type: ignore[return-value]

    def replicated(self, n: FxNode) -> list[Value | None] | Value:
        """The op as one that is not split. Only its memory traffic is priced."""
        outs = specs_of(n.meta["val"], self.place(n))
        reads = [self.env[m] for m in n.all_input_nodes]
        c = TorchCall(low=self, op=str(n.target), given={}, outs=outs, place=self.place(n))
        tensors = [c.tensor(v) for v in reads if isinstance(v, Value) and v.elements]
        made = iter(nests.opaque(self.b, str(n.target), tensors, [s for s in outs if s is not None]))
        found = [None if s is None else c.value(next(made)) for s in outs]
        return found if isinstance(n.meta["val"], (tuple, list)) else found[0]  # type: ignore[return-value]


def contents_of(t: torch.Tensor) -> Callable[[], np.ndarray] | None:
    """How to get a tensor's numbers, for ``GraphBuilder.constant``. None if it has none."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(t, FakeTensor) or t.is_meta:
        return None

    def numbers() -> np.ndarray:
        narrow = t.is_floating_point() and t.dtype.itemsize < 4  # numpy lacks some of these
        return (
            torch.asarray(t.detach(), device="cpu", dtype=torch.float32 if narrow else None)
            .resolve_conj()
            .numpy()
        )

    return numbers


_SIZES = frozenset({"size", "shape", "sizes", "repeats", "end", "steps"})
"""Arguments that only say the shape of the result, which the graph has."""


def _plain(n: FxNode) -> list[tuple[str, object]]:
    """The numbers and strings among a call's arguments, except sizes."""
    given = arguments(n.target, n.args, n.kwargs).items()
    plain = (bool, int, float, str)
    return [
        (k, v)
        for k, v in given
        if k not in _SIZES
        and (isinstance(v, plain) or (isinstance(v, (list, tuple)) and all(isinstance(x, plain) for x in v)))
    ]


def _traced(n: FxNode, how: Callable[..., Tree], **options: Any) -> GraphModule:
    """Trace ``how`` on the operands of a node into a graph.

    how: is called with the arguments that the node gives its op. options: for ``make_fx``; by default, composite ops
    stay whole.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = n.all_input_nodes

    def call(*tensors: Tensor) -> Tree:
        given = dict(zip(leaves, tensors, strict=True))
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), given.__getitem__)  # type: ignore[arg-type]
        return how(*args, **kwargs)

    # A fake tensor may still belong to the autograd graph of the export.
    values = [m.meta["val"].detach() for m in leaves]
    return make_fx(call, **({"pre_dispatch": True} | options))(*values)


def _decomposed(n: FxNode) -> GraphModule | None:
    """PyTorch's decomposition of one op, as a graph on the op's operands.

    None if there is none, or if it writes in place: what it writes to its operands would be lost.
    """
    import torch
    from torch._decomp import get_decompositions
    from torch._subclasses.functional_tensor import dispatch_functionalize

    if not isinstance(n.target, torch._ops.OpOverload):
        return None
    if not all(isinstance(m.meta.get("val"), torch.Tensor) for m in n.all_input_nodes):
        return None
    table: Any = get_decompositions([n.target])
    ways: list[Callable[..., object]] = [n.target]
    if n.target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        ways.append(dispatch_functionalize(n.target))  # for composite ops that write in place inside
    for how in ways:
        try:
            inner = _traced(n, how, pre_dispatch=False, decomposition_table=table)
        except (RuntimeError, NotImplementedError, TypeError):  # no decomposition that runs on fake tensors
            continue
        targets = [m.target for m in inner.graph.nodes]
        written = any(getattr(getattr(t, "_schema", None), "is_mutable", False) for t in targets)
        if not written and n.target not in targets:
            return inner
    return None
