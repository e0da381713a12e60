"""Copies a rank's part of an array that is not split, where backward keeps only the part.

A part is a view: what autograd saves of it keeps the whole array. A copy of the part lets the array go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.collectives import EdgeCall
from pase.backends.torch.spmd.record import ProgramCall

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph
    from torch.fx import Node as FxNode

    from pase.pytree import Tree

__all__ = ["SavedTensors"]


@dataclass(kw_only=True)
class SavedTensors:
    """What autograd saves while a program is recorded.

    found: array -> the places in it (``_place``) of the tensors that are saved. The arrays are kept alive, so that no
        other is taken for them.
    """

    found: dict[int, tuple[object, set[tuple[int, int]]]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is saved in this context."""
        import torch

        def pack(x: Tensor) -> Tensor:
            if (array := _array(x)) is not None:
                self.found.setdefault(array, (x.untyped_storage(), set()))[1].add(_place(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield

    def copy_parts(self, graph: Graph) -> None:
        """Copy the parts that are saved, unless the array is kept for something else or the parts are all of it.

        The values of the graph's nodes (``meta["val"]``) must be known.
        """
        of: dict[int, list[FxNode]] = {}
        for n in graph.nodes:
            if (array := _array(n.meta.get("val"))) in self.found:
                of.setdefault(array, []).append(n)
        for array, nodes in of.items():
            places = self.found[array][1]
            keeping = {p: {_cut(n) for n in nodes if _place(n.meta["val"]) == p} for p in places}
            taken = {cut for cuts in keeping.values() for cut in cuts}
            if not all(keeping.values()) or any(n.op in ("placeholder", "get_attr") for n in nodes):
                continue
            cuts = [n for n in nodes if n in taken]
            parts = {_place(n.meta["val"]): n.meta["val"].nbytes for n in cuts}
            if None in taken or sum(parts.values()) >= nodes[0].meta["val"].untyped_storage().nbytes():
                continue
            for n in cuts:
                with graph.inserting_after(n):
                    made = graph.call_method("clone", (n,))
                made.meta |= n.meta
                n.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)


def _array(x: Tree) -> int | None:
    """The identity of a dense tensor's array."""
    import torch

    dense = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return x.untyped_storage()._cdata if dense else None


def _place(x: Tensor) -> tuple[int, int]:
    """The first and the last element of a tensor in its array. Views of the same elements have the same."""
    first = x.storage_offset()
    return first, first + sum((n - 1) * by for n, by in zip(x.shape, x.stride(), strict=True))


def _cut(n: FxNode | None) -> FxNode | None:
    """The last node that takes a rank's part of an array on the way to this view of it, by the plan and not by the
    user's program; None if there is none."""
    while n is not None:
        array = _array(n.meta["val"])
        base = next((x for x in n.all_input_nodes if _array(x.meta.get("val")) == array), None)
        mine = isinstance(n.target, ProgramCall) and isinstance(n.target.run, EdgeCall)
        narrows = mine or (n.op == "call_method" and n.target == "narrow")
        if narrows and base is not None and n.meta["val"].numel() < base.meta["val"].numel():
            return n
        n = base
    return None
