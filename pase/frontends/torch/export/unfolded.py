"""Replaces the calls that stand for layers (``folded``) by copies of the traced layers, after comparing the traces."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.frontends.torch.export.alike import same_nodes
from pase.frontends.torch.export.folded import LIBRARY, Folding, FoldNode, fold_ops
from pase.frontends.torch.values import TorchOperand

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, GraphModule

__all__ = ["unfolded"]


def unfolded(exported: ExportedProgram, fold: Folding, prefix: str) -> bool:
    """Expand each call that stands for a layer, and remove the marks.

    Returns False if traced layers differ, or if nodes outside a layer use tensors that were made inside it. The graph
    is then unusable. prefix: of the user module's paths in the exported module.
    """
    if not fold.begun:
        return True
    graph = exported.graph_module.graph
    for n in graph.nodes:  # PyTorch's passes on no_grad regions drop users that have no users themselves
        for m in n.all_input_nodes:
            m.users.setdefault(n)
    marks = _marks(graph)
    wanted = {r for r, _ in fold.copies}
    numbers = wanted | {c for r in wanted for c in fold.checks[r]}
    if fold.unequal or any(n not in marks or marks[n][1] is None for n in numbers):
        return False
    outputs = {m for n in graph.nodes if n.op == "output" for m in n.all_input_nodes}
    every = [n for pair in marks.values() for n in pair if n is not None]
    if any(m in outputs for n in (*every, *_calls(graph)) for m in n.users):
        return False
    regions = {n: _Between.of(*marks[n]) for n in numbers}
    if any(r.leaks() for r in regions.values()):
        return False
    held = _held(exported, fold.paths, prefix)
    own_tensors = {r: _inside(regions[r], fold.regions[r].path, held, fold.paths) for r in wanted}

    def swapped(number: int, path: str) -> dict[FoldNode, FoldNode]:
        return {p: held[fold.paths[f"{path}.{rel}"]] for p, rel in own_tensors[number].items()}

    for r in wanted:
        for c in fold.checks[r]:
            first, there = regions[r], regions[c]
            env = {**dict(zip(first.entered, there.entered, strict=True)), **swapped(r, fold.regions[c].path)}
            if not same_nodes(exported, (first.written, there.written), env):
                return False
    for n in _calls(graph):
        number, path = fold.copies[n.args[1]]
        _copied(
            graph,
            n,
            regions[number],
            swapped(number, path),
            (prefix + fold.regions[number].path, prefix + path),
        )
    for begin, end in marks.values():
        graph.erase_node(begin)
        if end is not None:
            _replaced(graph, end, end.args[0])
    return not any(m.startswith(LIBRARY) for m in _targets(exported.graph_module))


def _targets(graph_module: GraphModule) -> Iterator[str]:
    """The targets of a module's nodes, including the nodes of the bodies that they read."""
    import torch

    for n in graph_module.graph.nodes:
        yield str(n.target)
        if n.op == "get_attr" and isinstance(
            body := getattr(graph_module, n.target, None), torch.fx.GraphModule
        ):
            yield from _targets(body)


@dataclass(frozen=True)
class _Between:
    """The nodes between two marks. entered: the layer's operands, in order. outer: other nodes that are read."""

    begin: FoldNode
    end: FoldNode
    nodes: tuple[FoldNode, ...]
    entered: tuple[FoldNode, ...]
    outer: frozenset[FoldNode]

    @staticmethod
    def of(begin: FoldNode, end: FoldNode) -> _Between:
        nodes = []
        n = begin.next
        while n is not end:
            nodes.append(n)
            n = n.next
        entered = tuple(begin.args[0])
        read = {m for n in (*nodes, end) for m in n.all_input_nodes}
        return _Between(begin, end, tuple(nodes), entered, frozenset(read - set(nodes) - set(entered)))

    @property
    def written(self) -> tuple[tuple[FoldNode, ...], tuple[FoldNode, ...], Mapping[str, TorchOperand]]:
        """The nodes, the results, and the ``custom`` metadata that holds around the layer."""
        return self.nodes, tuple(self.end.args[0]), self.begin.meta.get("custom") or {}

    def leaks(self) -> bool:
        own = {*self.nodes, self.end}
        return any(u not in own for n in self.nodes for u in n.users)


def _held(exported: ExportedProgram, first: Mapping[str, str], prefix: str) -> dict[str, FoldNode]:
    """First path of a tensor -> one of its placeholders."""
    signature = exported.graph_signature
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = {n.name: n for n in exported.graph_module.graph.nodes if n.op == "placeholder"}
    paths = {name: path.removeprefix(prefix) for name, path in named.items()}
    return {first.get(path, path): nodes[name] for name, path in paths.items()}


def _inside(
    there: _Between, layer: str, held: Mapping[str, FoldNode], first: Mapping[str, str]
) -> dict[FoldNode, str]:
    """The layer's own tensors among those that its nodes read: placeholder -> path inside the layer."""
    own = {f: p.removeprefix(layer + ".") for p, f in first.items() if p.startswith(layer + ".")}
    at = {n: path for path, n in held.items()}
    return {n: own[at[n]] for n in there.outer if at.get(n) in own}


def _calls(graph: Graph) -> list[FoldNode]:
    return [n for n in graph.nodes if n.target is fold_ops().again.default]


def _marks(graph: Graph) -> dict[int, tuple[TorchOperand, TorchOperand]]:
    """Number of a region -> (begin mark, end mark or None)."""
    out: dict[int, tuple[TorchOperand, TorchOperand]] = {}
    for n in graph.nodes:
        if n.target is fold_ops().begin.default:
            out[n.args[1]] = (n, None)
        elif n.target is fold_ops().end.default:
            out[n.args[1]] = (out[n.args[1]][0], n)
    return out


def _copied(
    graph: Graph,
    call: FoldNode,
    there: _Between,
    swapped: Mapping[FoldNode, FoldNode],
    paths: tuple[str, str],
) -> None:
    """Replace the call by a copy of the traced nodes.

    swapped: the traced layer's tensors -> this layer's. paths: of the traced layer and of this layer in the exported
    module. The traced operands are read from the mark, because an earlier copy may have replaced one of them.
    """
    env: dict[TorchOperand, TorchOperand] = dict(zip(there.begin.args[0], call.args[0], strict=True))
    env |= swapped
    stacks: dict[int, object] = {}
    marks = call.meta.get("custom") or {}
    with graph.inserting_before(call):
        for n in there.nodes:
            new = graph.node_copy(n, lambda m: env.get(m, m))
            stack = n.meta.get("nn_module_stack")
            if stack is not None:
                if id(stack) not in stacks:
                    stacks[id(stack)] = {k: (_moved(path, *paths), of) for k, (path, of) in stack.items()}
                new.meta["nn_module_stack"] = stacks[id(stack)]
            if marks or n.meta.get("custom"):
                new.meta["custom"] = _custom(n.meta.get("custom") or {}, there, marks, call.name)
            env[n] = new
    _replaced(graph, call, [env.get(m, m) for m in there.end.args[0]])


def _custom(
    own: Mapping[str, TorchOperand], there: _Between, marks: Mapping[str, TorchOperand], copy: str
) -> dict[str, TorchOperand]:
    """The marks of a copied node: those around the layer are the call's, those inside the layer are the copy's own."""
    around = there.begin.meta.get("custom") or {}
    inside = {k: v for k, v in own.items() if around.get(k) != v}
    return {**{k: v if v == 1 else f"{v} of {copy}" for k, v in inside.items()}, **marks}


def _moved(path: str, before: str, after: str) -> str:
    return after + path[len(before) :] if path == before or path.startswith(before + ".") else path


def _replaced(graph: Graph, mark: FoldNode, by: Sequence[FoldNode]) -> None:
    for reader in list(mark.users):
        assert reader.target is operator.getitem, reader
        reader.replace_all_uses_with(by[reader.args[1]])
        graph.erase_node(reader)
    graph.erase_node(mark)
