"""Writes in place that change a value and not its gradient (``torch.no_grad``, ``detach``)."""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from pase.errors import PaseError
from pase.frontends.torch.export.functional import bodies_of
from pase.frontends.torch.export.traceable import DATA
from pase.frontends.torch.passed import passed_op
from pase.frontends.torch.reasons import of_pytorch
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import op_name

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.fx import Graph, GraphModule, Node
    from torch.fx.node import Argument

__all__ = ["keep_gradients_past_writes"]

_RESULT_NOT_SAVED = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "add",
        "sub",
        "mul",
        "div",
        "conv1d",
        "conv2d",
        "conv3d",
        "embedding",
    }
)
"""Ops whose backward in PyTorch does not read their result."""
_OPERANDS_NOT_SAVED = frozenset({"add", "sub", "neg", "sum", "mean", "cat", "stack"})
"""Ops whose backward in PyTorch does not read their operands."""
_PASSED = "write y = x + (new - x).detach(), which leaves the gradient of x as it is, or write with gradients enabled"


def keep_gradients_past_writes(graph_module: GraphModule, trained: Container[str], name: str) -> None:
    """Add to an exported step what its writes in place without a gradient (``no_grad``, ``detach``) do to gradients.

    PyTorch leaves the gradient of the written value as it was before the write. Decomposition makes the value the
    result of an op without a gradient, which would cut it off. So after the write, the value becomes ``passed(new,
    old)``. Parameters are not considered here. trained: the placeholders that have a gradient (what the
    step writes into the others may have one afterwards). name: the module's.
    Raises PaseError for a write whose gradient is not known.
    """
    given = {s for n in graph_module.graph.nodes if n.name in trained for s in _storages(n)}
    _Writes(name, given, given).walk(graph_module, True)


def _storages(n: FxNode) -> set[int]:
    """The memory of a node's values that can have a gradient. Views have that of their base."""
    import torch
    from torch._C import _functorch

    made = n.meta.get("val")
    found = set()
    for t in made if isinstance(made, (list, tuple)) else [made]:
        while isinstance(t, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(t):  # of torch.vmap
            t = _functorch.get_unwrapped(t)
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
            found.add(t.untyped_storage()._cdata)
    return found


def _is_whole(t: object) -> bool:
    """Whether a tensor is all of its memory."""
    import torch
    from torch._C import _functorch

    if not isinstance(t, torch.Tensor) or _functorch.is_functorch_wrapped_tensor(t):
        return False
    return t.numel() * t.element_size() == t.untyped_storage().nbytes()


def _written(n: FxNode) -> Iterator[FxNode]:
    """The operands that an op writes in place."""
    schema = getattr(n.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            yield from (
                v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, type(n))
            )


class _Writes:
    """One pass over an exported graph with its regions."""

    def __init__(self, name: str, trained: set[int], given: set[int]) -> None:
        self.name, self.given = name, given
        self.watched = set(trained)
        """Memory of values that have a gradient."""
        self.saved = set(trained)
        """Memory that backward may read as it was at some earlier point."""
        self.cut: set[FxNode] = set()
        """Nodes that read memory with a gradient without it."""
        self.data: set[FxNode] = set()
        """Those of them through ``.data``: PyTorch does not notice their writes to what backward reads."""
        self.hidden: dict[int, FxNode] = {}
        """Memory with a gradient that was written without it -> the write, until the gradient is passed on."""

    def walk(self, graph_module: GraphModule, recording: bool) -> None:
        """recording: whether gradients are recorded around the graph."""
        graph = graph_module.graph
        views: dict[int, list[Node]] = {}
        for n in list(graph.nodes):
            if str(n.target).startswith("wrap_with"):
                self._region(graph_module, n, recording)
            elif n.op == "call_function":
                self._call(n, recording, views)
            for body in bodies_of(n):  # each operand may have a gradient
                given = {s for m in body.graph.nodes if m.op == "placeholder" for s in _storages(m)}
                _Writes(self.name, given, set()).walk(body, recording)
            if recording:
                for memory, write in self.hidden.items():
                    self._pass_on(graph, n, write, views.get(memory, []))
                self.hidden.clear()
            for memory in _storages(n):
                views.setdefault(memory, []).append(n)
        graph_module.recompile()

    def _region(self, graph_module: GraphModule, n: FxNode, recording: bool) -> None:
        inner = next(i for i, a in enumerate(n.args) if getattr(a, "op", "") == "get_attr")
        region = getattr(graph_module, n.args[inner].target)
        places = [m for m in region.graph.nodes if m.op == "placeholder"]
        given = list(zip(places, n.args[inner + 1 :], strict=True))
        results: Any = region.graph.output_node().args[0]
        for known in (self.cut, self.data):
            known |= {p for p, a in given if a in known}
        self.walk(region, bool(n.args[0]) if "set_grad" in str(n.target) else recording)
        for known in (self.cut, self.data):
            known |= {user for user in n.users if results[user.args[1]] in known}

    def _call(self, n: FxNode, recording: bool, views: dict[int, list[Node]]) -> None:
        kind, here, written = op_name(n).rstrip("_"), _storages(n), list(_written(n))
        read = {m: _storages(m) for m in n.all_input_nodes}
        recorded = {m: of & self.watched for m, of in read.items() if recording and m not in self.cut}
        for value in written:
            if any(recorded.values()) and value in self.cut:
                self._detach_operands(n, [v for memory in _storages(value) for v in views.get(memory, ())])
            memory = _storages(value) & self.watched - self.given
            if not memory or (recording and value not in self.cut):
                continue
            if value in self.data and memory & self.saved:
                self._refuse(n, "writes by .data into what backward may read, which PyTorch does not notice")
            self.hidden |= dict.fromkeys(memory, n)
        same = written or [m for m, of in read.items() if of & here]
        if any(m in self.data for m in same) or DATA in (n.meta.get("custom") or {}):
            self.data.add(n)
        if kind == "detach" or any(m in self.cut for m in same):
            self.cut.add(n)
        elif (
            any(recorded.values()) and not kind.endswith("_like") and not kind.startswith("new_")
        ):  # of shapes
            self.watched |= here
            if written or not same:
                self.saved |= set() if kind in _RESULT_NOT_SAVED else here
                self.saved |= set() if kind in _OPERANDS_NOT_SAVED else set().union(*recorded.values())

    def _detach_operands(self, n: FxNode, views: list[Node]) -> None:
        """Make node n write into a detached tensor without gradients: they would be that tensor's alone.

        Raises PaseError if the step reads the tensor afterwards. views: the nodes before n that have its memory.
        """
        import torch

        order = {m.name: i for i, m in enumerate(n.graph.nodes)}
        readers = {m.name for m in n.users} | {m.name for v in views if v in self.cut for m in v.users}
        if any(order[name] > order[n.name] for name in readers):
            self._refuse(
                n,
                "writes what has a gradient through a detached tensor, which then has one, too",
                "write into a copy (x = x.detach().clone())",
            )
        node: Any = n
        for m in n.all_input_nodes:
            if m not in self.cut and _storages(m):
                with node.graph.inserting_before(node):
                    detached = node.graph.call_function(torch.ops.aten.detach.default, (m,))
                detached.meta.update(m.meta)
                node.replace_input_with(m, detached)

    def _pass_on(self, graph: Graph, n: Node, write: FxNode, views: list[Node]) -> None:
        """Give the memory that ``write``, in or at node n of a graph, has written the gradient that it had before.

        views: the nodes before n that have this memory.
        """
        import torch

        aten = torch.ops.aten
        whole = next((v for v in views if v not in self.cut and _is_whole(v.meta.get("val"))), None)
        if whole is None:
            self._refuse(write, "writes in place, without a gradient, into part of a value that has one")
        kept = {"stack_trace", "nn_module_stack", "custom"}
        meta = {key: noted for key, noted in write.meta.items() if key in kept}

        def add(op: OpOverload, *args: Argument) -> Node:
            made = graph.call_function(op, args)
            made.meta.update(meta)
            return made

        with graph.inserting_before(n):
            old = add(aten.clone.default, whole)
        after = n
        while after.next.target is operator.getitem and after.next.args[0] is n:
            after = after.next
        with graph.inserting_before(after.next):
            add(aten.copy_.default, whole, add(passed_op(), add(aten.detach.default, whole), old))

    def _refuse(self, n: FxNode, what: str, fix: str = _PASSED) -> NoReturn:
        frames = re.findall(r'File "([^"\n]{1,300})", line (\d{1,7})', n.meta.get("stack_trace") or "")
        own = [f"{file}:{line}" for file, line in frames if not of_pytorch(file)]
        raise PaseError(
            f"{op_name(n)} {what}",
            where=f"{self.name}{' at ' if own else ''}{''.join(own[-1:])}",
            fix=fix,
        )
