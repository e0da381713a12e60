"""What pase reads of a graph of torch.fx, as types: PyTorch's own class says little of a node's target and operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["FxNode"]


class FxNode(Protocol):
    """A node of a graph. target: the op, or the name of what it gets. meta: what the export noted of it."""

    @property
    def name(self) -> str:
        """Its name, unique in the graph."""
        ...

    @property
    def op(self) -> str:
        """call_function, placeholder, get_attr or output."""
        ...

    @property
    def target(self) -> Any:
        """An operator, a function, or a name."""
        ...

    @property
    def args(self) -> Sequence[Any]:
        """Nodes, numbers, and lists of them."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Those that are given by name."""
        ...

    @property
    def meta(self) -> dict[str, Any]:
        """``val``: fake tensors for what it makes."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph that it is in."""
        ...

    @property
    def all_input_nodes(self) -> Sequence[FxNode]:
        """The nodes that it reads, each once."""
        ...
