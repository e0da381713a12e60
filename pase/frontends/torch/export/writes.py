"""Refuses writes in place that change a value and not its gradient, which a graph without writes does not express."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.torch.reasons import of_pytorch
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import op_name

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["refuse_unwatched_writes"]


def refuse_unwatched_writes(graph_module: GraphModule, name: str) -> None:
    """Raise PaseError if the step writes into a value with a gradient where none is recorded (``no_grad``, ``detach``).

    PyTorch leaves the gradient as it was before the write. Decomposition makes the written value the result of an op
    without a gradient, which would cut it off. Parameters and buffers are not considered here. name: the module's.
    """
    given = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    trained = {s for n in given if getattr(n.meta.get("val"), "requires_grad", False) for s in _storages(n)}
    _Writes(name, trained, {s for n in given for s in _storages(n)}).check(graph_module, True)


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


class _Writes:
    """One pass over an exported graph with its regions."""

    def __init__(self, name: str, trained: set[int], given: set[int]) -> None:
        self.name, self.given = name, given
        self.watched = set(trained)
        """Memory of values that have a gradient."""
        self.cut: set[FxNode] = set()
        """Nodes that read such memory without the gradient."""

    def check(self, graph_module: GraphModule, recording: bool) -> None:
        for n in graph_module.graph.nodes:
            if str(n.target).startswith("wrap_with"):
                self._region(graph_module, n, recording)
            elif n.op == "call_function":
                self._call(n, recording)

    def _region(self, graph_module: GraphModule, n: FxNode, recording: bool) -> None:
        inner = next(i for i, a in enumerate(n.args) if getattr(a, "op", "") == "get_attr")
        region = getattr(graph_module, n.args[inner].target)
        places = [m for m in region.graph.nodes if m.op == "placeholder"]
        self.cut |= {p for p, a in zip(places, n.args[inner + 1 :], strict=True) if a in self.cut}
        self.check(region, bool(n.args[0]) if "set_grad" in str(n.target) else recording)
        results: Any = region.graph.output_node().args[0]
        self.cut |= {user for user in n.users if results[user.args[1]] in self.cut}

    def _call(self, n: FxNode, recording: bool) -> None:
        schema = getattr(n.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), n.args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, type(n)) and (not recording or value in self.cut):
                self._refuse(n, _storages(value) & self.watched - self.given)
        here, kind = _storages(n), op_name(n)
        read = {m: _storages(m) for m in n.all_input_nodes}
        if kind == "detach" or any(m in self.cut and of & here for m, of in read.items()):
            self.cut.add(n)
        elif kind.endswith("_like") or kind.startswith("new_"):
            return  # reads the shape alone
        elif recording and any(m not in self.cut and of & self.watched for m, of in read.items()):
            self.watched |= here

    def _refuse(self, n: FxNode, written: set[int]) -> None:
        if not written:
            return
        frames = re.findall(r'File "([^"\n]{1,300})", line (\d{1,7})', n.meta.get("stack_trace") or "")
        own = [f"{file}:{line}" for file, line in frames if not of_pytorch(file)]
        raise PaseError(
            f"{op_name(n)} writes in place into a value that has a gradient, where none is recorded (torch.no_grad, "
            "detach, .data). PyTorch leaves the gradient as it was before the write, which pase does not",
            where=f"{self.name}{' at ' if own else ''}{''.join(own[-1:])}",
            fix="write y = x + (new - x).detach(), which has this gradient, or write with gradients enabled",
        )
