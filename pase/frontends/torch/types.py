"""Types for the parts of a torch.fx graph that pase reads. PyTorch's own types say little about a node's operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["FxNode"]


class FxNode(Protocol):
    """A node of a graph. target: the op, or the name of the attribute that it gets. meta: notes of the export."""

    @property
    def name(self) -> str:
        """The node's name, unique in the graph."""
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
        """Positional arguments: nodes, numbers, and lists of them."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Keyword arguments."""
        ...

    @property
    def users(self) -> Mapping[FxNode, None]:
        """The nodes that read its results."""
        ...

    @property
    def meta(self) -> dict[str, Any]:
        """``val``: fake tensors of the results; and further notes of the export."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph that contains the node."""
        ...

    @property
    def all_input_nodes(self) -> Sequence[FxNode]:
        """The nodes that it reads, each once."""
        ...
