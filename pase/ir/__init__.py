"""The iteration-space IR."""

from pase.ir.names import dim_classes, named
from pase.ir.simplify import simplify
from pase.ir.sizes import Size, parse_size, symbol
from pase.ir.types import (
    Access,
    AccessMap,
    Dim,
    DimKind,
    Edge,
    Graph,
    IterationSpace,
    Node,
    Op,
    OpKind,
    Role,
    Tensor,
    Walk,
    Window,
)
from pase.ir.verify import verify

__all__ = [
    "Access",
    "AccessMap",
    "Dim",
    "DimKind",
    "Edge",
    "Graph",
    "IterationSpace",
    "Node",
    "Op",
    "OpKind",
    "Role",
    "Size",
    "Tensor",
    "Walk",
    "Window",
    "dim_classes",
    "named",
    "parse_size",
    "simplify",
    "symbol",
    "verify",
]
