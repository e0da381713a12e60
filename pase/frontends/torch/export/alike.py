"""Compares two runs of torch.fx nodes, up to names and tensors that are allowed to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pase.frontends.torch.export.equal import kind_of
from pase.frontends.torch.values import TorchOperand

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

__all__ = ["same_nodes"]

_NodeRun: TypeAlias = tuple[Sequence[TorchOperand], Sequence[TorchOperand], Mapping[str, TorchOperand]]
"""The nodes, their results, and the ``custom`` metadata that holds around them."""


def same_nodes(
    exported: ExportedProgram, runs: tuple[_NodeRun, _NodeRun], env: Mapping[TorchOperand, TorchOperand]
) -> bool:
    """Whether the first run becomes the second when outside nodes are replaced by env (outside node -> replacement).

    Constants are compared by value.
    """
    signature = exported.graph_signature
    constants = {
        name: exported.constants.get(target)
        for name, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    return _same(runs, dict(env), constants, exported.graph_module)


def _same(
    runs: tuple[_NodeRun, _NodeRun],
    env: dict[TorchOperand, TorchOperand],
    constants: Mapping[str, TorchOperand],
    owner: GraphModule,
) -> bool:
    import torch

    (nodes, results, around), (others, ends, outside) = runs
    nodes, others = ([n for n in run if n.users or n.op != "get_attr"] for run in (nodes, others))
    marks: dict[TorchOperand, TorchOperand] = {}
    if len(nodes) != len(others) or len(results) != len(ends):
        return False

    def here(a: TorchOperand, b: TorchOperand) -> bool:
        """Whether two operands, of the first run and of the second, are the same."""
        if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node):
            return env.get(a, a) is b or (
                a not in env and _alike(constants.get(a.name), constants.get(b.name))
            )
        return type(a) is type(b) and bool(a == b)

    def every(a: TorchOperand, b: TorchOperand) -> bool:
        x, xs = torch.utils._pytree.tree_flatten(a)
        y, ys = torch.utils._pytree.tree_flatten(b)
        return xs == ys and all(map(here, x, y))

    for n, m in zip(nodes, others, strict=True):
        if n.op != m.op or not every((tuple(n.args), dict(n.kwargs)), (tuple(m.args), dict(m.kwargs))):
            return False
        if n.op == "get_attr":
            if not _alike(_attribute(owner, n.target), _attribute(owner, m.target)):
                return False
        elif n.op != "placeholder" and n.target != m.target:
            return False
        if _kinds(n) != _kinds(m):
            return False
        own, theirs = _marks(n, around), _marks(m, outside)
        if own.keys() != theirs.keys() or any(
            marks.setdefault((k, own[k]), theirs[k]) != theirs[k] for k in own
        ):
            return False
        env[n] = m
    return all(map(here, results, ends))


def _alike(a: TorchOperand, b: TorchOperand) -> bool:
    """Whether two constants, or two bodies (of a scan, of a cond), are the same."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(a, torch.fx.GraphModule) and isinstance(b, torch.fx.GraphModule):
        return _bodies(a, b, tuple(a.graph.nodes), tuple(b.graph.nodes))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a is b:
            return True
        if isinstance(a, FakeTensor) or isinstance(b, FakeTensor) or kind_of(a) != kind_of(b):
            return False
        return torch.equal(a, b)
    return False


def _bodies(
    a: GraphModule, b: GraphModule, own: Sequence[TorchOperand], other: Sequence[TorchOperand]
) -> bool:
    """Whether two bodies are the same. Bodies that hold bodies or constants of their own count as different."""
    if any(n.op == "get_attr" and n.users for n in (*own, *other)):
        return False
    return _same(((own, (), {}), (other, (), {})), {}, {}, a)


def _attribute(owner: TorchOperand, target: str) -> TorchOperand:
    for name in target.split("."):
        owner = getattr(owner, name)
    return owner


def _kinds(n: TorchOperand) -> list[object]:
    import torch

    every = torch.utils._pytree.tree_leaves(n.meta.get("val"))
    return [kind_of(x)[:5] if isinstance(x, torch.Tensor) else type(x) for x in every]


def _marks(n: TorchOperand, around: Mapping[str, TorchOperand]) -> dict[str, TorchOperand]:
    """pase's own marks of a node, without those that hold around the run.

    PyTorch's marks are ignored: they record which of its functions ran, which may differ between equal layers.
    """
    own = (n.meta.get("custom") or {}).items()
    return {k: v for k, v in own if k.startswith("pase") and around.get(k) != v}
