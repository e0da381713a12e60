"""Types for the parts of a jaxpr that pase reads. JAX's own classes do not type shapes and the values of literals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from pase.pytree import Tree

__all__ = ["Aval", "ClosedJaxpr", "Eqn", "Jaxpr", "LiteralVar", "Primitive", "Var"]


class Aval(Protocol):
    """The shape and dtype of a value. A dim of the shape is a number, or an expression of jax.export."""

    shape: tuple[Any, ...]
    dtype: np.dtype
    weak_type: bool
    size: int

    @property
    def ndim(self) -> int:
        """The number of dims."""
        ...


class Var(Protocol):
    """A variable of a jaxpr, or a literal."""

    aval: Aval


class LiteralVar(Var, Protocol):
    """A literal: a number in the equation itself."""

    val: Any


class Primitive(Protocol):
    """What an equation applies."""

    name: str
    multiple_results: bool

    def bind(self, *args: Any, **params: Any) -> Any:
        """Applies it. Returns one array, or a list if it has several results."""
        ...


class Eqn(Protocol):
    """An equation of a jaxpr. params: the parameters of its primitive, whose types depend on the name."""

    primitive: Primitive
    invars: Sequence[Var]
    outvars: Sequence[Var]
    params: dict[str, Any]
    source_info: Any
    effects: frozenset[object]

    def replace(self, **changes: Any) -> Eqn:
        """The equation with some fields changed."""
        ...


class Jaxpr(Protocol):
    """A list of equations."""

    constvars: Sequence[Var]
    invars: Sequence[Var]
    outvars: Sequence[Var]
    eqns: Sequence[Eqn]
    debug_info: Any
    effects: frozenset[object]


class ClosedJaxpr(Protocol):
    """A jaxpr with its constants."""

    jaxpr: Jaxpr
    consts: Sequence[Tree]

    @property
    def in_avals(self) -> Sequence[Aval]:
        """The types of its operands."""
        ...

    @property
    def out_avals(self) -> Sequence[Aval]:
        """The types of its results."""
        ...
