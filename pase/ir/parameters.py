"""Parameters of ops: what an op computes beyond its function, literals and access maps.

Most ops need none. An op whose maps do not say which elements it takes, or in which order it goes through a dim, has
one of these. Dims are those of the first operand; all numbers are in elements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TypeAlias, get_args

from pase.errors import PaseError
from pase.ir.literals import Number, literals_text, read_literals

__all__ = [
    "Concatenate",
    "Cumulative",
    "EqualPart",
    "Iota",
    "Pad",
    "Parameters",
    "Reshape",
    "Slice",
    "Sort",
    "StackRow",
    "Take",
    "Windows",
    "parameters_text",
    "read_parameters",
]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Element i of a dim of the result is element ``start + i * step`` of that dim. A step may be negative."""

    start: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EqualPart:
    """The result is one of ``count`` equal parts of a dim."""

    axis: int
    index: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Take:
    """Element i of a dim of the result is element ``index[i]`` of that dim."""

    axis: int
    index: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Reshape:
    """The same elements, major to minor, in a shape whose dims do not nest with the operand's."""


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """One iteration's row of a stack. reverse: the loop begins at the last row."""

    reverse: bool


@dataclass(frozen=True, kw_only=True)
class Pad:
    """A number around the operand and between its elements. before: elements in front of each dim; if negative, so many
    of the operand's are left out. interior: elements after each one except the last."""

    before: tuple[int, ...]
    interior: tuple[int, ...]
    value: Number


@dataclass(frozen=True, kw_only=True)
class Concatenate:
    """The operands, one after another along a dim."""

    axis: int


@dataclass(frozen=True, kw_only=True)
class Cumulative:
    """A reduction of all elements up to each one. reverse: from the end. exclusive: without the element itself."""

    axis: int
    reverse: bool
    exclusive: bool


@dataclass(frozen=True, kw_only=True)
class Sort:
    """The elements along a dim in order. Equal elements keep their order."""

    axis: int
    descending: bool


@dataclass(frozen=True, kw_only=True)
class Iota:
    """Element i along a dim of the result is ``start + i * step``."""

    axis: int
    start: Number
    step: Number


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The distance between two elements of a window, for each dim."""

    dilation: tuple[int, ...]


Parameters: TypeAlias = (
    Slice | EqualPart | Take | Reshape | StackRow | Pad | Concatenate | Cumulative | Sort | Iota | Windows
)

_CLASSES = {c.__name__.lower(): c for c in get_args(Parameters)}
_TEXT = re.compile(r"([a-z]+)\(([^()]*)\)")


def parameters_text(parameters: Parameters) -> str:
    """The parameters as text, which ``read_parameters`` reads.

    >>> parameters_text(Slice(start=(0, 2), step=(1, -1)))
    'slice(start=0,2 step=1,-1)'
    """
    words = (f"{f.name}={_value(getattr(parameters, f.name))}" for f in fields(parameters))
    return f"{type(parameters).__name__.lower()}({' '.join(words)})"


def _value(x: tuple[int, ...] | Number) -> str:
    return ",".join(map(str, x)) if isinstance(x, tuple) else literals_text((x,))[1:-1]


def read_parameters(text: str) -> Parameters:
    """The parameters that ``parameters_text`` wrote. Raises PaseError if it did not write this text."""
    found = _TEXT.fullmatch(text)
    kind = _CLASSES.get(found[1]) if found else None
    if found is None or kind is None:
        raise PaseError(
            f"'{text[:40]}' are no parameters of an op", fix=f"write one of {', '.join(_CLASSES)}"
        )
    given = dict(word.partition("=")[::2] for word in found[2].split())
    types = {f.name: str(f.type) for f in fields(kind)}
    if given.keys() != types.keys():
        raise PaseError(f"'{found[1]}' has the fields {', '.join(types)}, not {', '.join(given)}")
    return kind(**{name: _read(types[name], text) for name, text in given.items()})  # type: ignore[no-any-return]


def _read(kind: str, text: str) -> tuple[int, ...] | Number:
    words = text.split(",") if kind.startswith("tuple") and text else [text] * bool(text)
    values = read_literals(words) or ()
    if kind == "Number":
        fits = None not in values
    else:
        fits = all(type(v) is (bool if kind == "bool" else int) for v in values)
    if not fits or (len(values) != 1 and not kind.startswith("tuple")):
        raise PaseError(f"'{text[:40]}' is not what the parameter takes", fix=f"write {kind}")
    return values if kind.startswith("tuple") else values[0]  # type: ignore[return-value]
