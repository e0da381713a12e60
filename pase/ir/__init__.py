"""The iteration-space IR."""

from pase.ir.fixed import FixedLayout, FixedMesh
from pase.ir.maps import AccessMap, Walk, Window
from pase.ir.names import dim_classes, named
from pase.ir.places import Place, PlacePart, Scope, ScopeKind, SourceLine
from pase.ir.remarks import Remark, RemarkKind
from pase.ir.simplify import simplify
from pase.ir.sizes import Size, parse_size, symbol
from pase.ir.text import digest, from_text, to_text
from pase.ir.types import (
    Access,
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
)
from pase.ir.verify import verify

__all__ = [
    "Access",
    "AccessMap",
    "Dim",
    "DimKind",
    "Edge",
    "FixedLayout",
    "FixedMesh",
    "Graph",
    "IterationSpace",
    "Node",
    "Op",
    "OpKind",
    "Place",
    "PlacePart",
    "Remark",
    "RemarkKind",
    "Role",
    "Scope",
    "ScopeKind",
    "Size",
    "SourceLine",
    "Tensor",
    "Walk",
    "Window",
    "digest",
    "dim_classes",
    "from_text",
    "named",
    "parse_size",
    "simplify",
    "symbol",
    "to_text",
    "verify",
]
