"""Where an op is: its place in the traced program, the user's line, and the loops, branches and rematerialised regions
around it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from pase.errors import PaseError

__all__ = ["NOWHERE", "NO_PLACE", "Place", "PlacePart", "Scope", "ScopeKind", "SourceLine"]

PlacePart = Literal["const", "ask", "carry", "xs", "x", "y", "last", "outs", "out"]
"""What a loop or a branch defines in addition to the equations of its body:

const, ask: a constant of the body or of the condition, computed before the loop; carry: a carry; xs: a stack that is
read one slice per iteration; x: such a slice; y: a result that is stacked; last: the result of the last iteration;
outs: all that the body returns; out: what a branch returns (index: branch, result)."""

ScopeKind = Literal["loop", "remat", "branch", "program"]
"""program: one program of a model that consists of several programs."""

_SCOPE = re.compile(rf"({'|'.join(get_args(ScopeKind))})(?::|(?=\d)|$)(.*)", re.DOTALL)
_SOURCE = re.compile(r"(.*) \(([^()]+)\)", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_INDEX = "(?:0|[1-9][0-9]*)"
_LOOP_PARTS = "|".join(p for p in get_args(PlacePart) if p != "out")
_PLACE = re.compile(
    rf"(?P<path>.*):(?:(?P<part>{_LOOP_PARTS})(?P<index>(?:{_INDEX}(?:\.{_INDEX})*)?)"
    rf"|branch(?P<branch>{_INDEX}):out(?P<result>{_INDEX}))",
    re.DOTALL,
)


@dataclass(frozen=True)
class Place:
    """An equation of the traced program, or a value that a loop or a branch defines in addition to its equations.

    path: the frontend's number or name of the equation; "3.1" is the second equation inside the fourth.
    index: the value's index, if there are several.

    >>> at = Place("3.1")
    >>> str(at), str(at.its("carry", 2)), str(at.its("out", 0, 1)), bool(Place())
    ('3.1', '3.1:carry2', '3.1:branch0:out1', False)
    >>> Place.parse("3.1:carry2")
    Place(path='3.1', part='carry', index=(2,))
    """

    path: str = ""
    part: PlacePart | None = None
    index: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.path)

    def __str__(self) -> str:
        if self.part is None:
            return self.path
        if self.part == "out":
            branch, result = self.index
            return f"{self.path}:branch{branch}:out{result}"
        return f"{self.path}:{self.part}{'.'.join(map(str, self.index))}"

    def number_in(self, prefix: str) -> int | None:
        """The index of this equation, or of the equation around it, in the list of equations whose paths consist of
        this prefix and a number."""
        m = _NUMBER.match(self.path, len(prefix)) if self.path.startswith(prefix) else None
        return None if m is None else int(m[0])

    def steps(self) -> Iterator[tuple[str, int]]:
        """The lists of numbered equations that contain it, outermost first, as (prefix of their paths, its number).

        >>> list(Place("3.1").steps())
        [('', 3), ('3.', 1)]
        """
        prefix = ""
        for part in self.path.split("."):
            if m := _NUMBER.match(part):
                yield prefix, int(m[0])
            prefix += f"{part}."

    def numbers(self) -> tuple[int, ...] | None:
        """The equation's number at each depth; None if the frontend names its equations.

        >>> Place("3.1").numbers(), Place("layer.relu").numbers()
        ((3, 1), None)
        """
        parts = self.path.split(".")
        return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None

    def its(self, part: PlacePart, *index: int) -> Place:
        """A value that the loop or branch at this place defines."""
        return Place(self.path, part, index)

    @classmethod
    def parse(cls, text: str) -> Place:
        """The inverse of ``str``."""
        m = _PLACE.fullmatch(text)
        if m is None:
            return cls(text)
        if m["part"] is None:
            return cls(m["path"], "out", (int(m["branch"]), int(m["result"])))
        return cls(m["path"], m["part"], tuple(map(int, m["index"].split("."))) if m["index"] else ())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scope:
    """A loop's body, a rematerialised region, or a branch of a conditional.

    path: the prefix of the paths of the equations inside.

    >>> str(Scope("loop", "3.")), str(Scope("loop", "while/body")), Scope.parse("remat3.1.")
    ('loop3.', 'loop:while/body', Scope(kind='remat', path='3.1.'))
    """

    kind: ScopeKind
    path: str

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.path[:1].isdecimal() or not self.path else ':'}{self.path}"

    def encloses(self, prefix: str) -> bool:
        """Whether the scope contains the list of equations whose paths have this prefix."""
        return prefix.startswith(self.path)

    @classmethod
    def parse(cls, text: str) -> Scope:
        """The inverse of ``str``. Raises PaseError if the text is not a scope."""
        m = _SCOPE.fullmatch(text)
        if m is None:
            raise PaseError(
                f"'{text}' is not a scope",
                fix=f"write one of {', '.join(get_args(ScopeKind))}, followed by a path",
            )
        return cls(m[1], m[2])  # type: ignore[arg-type]


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program. It is false if no line is known.

    function: the function that contains the line, or "" if it is not known; in PyTorch, the module's path.
    call: the library's function that is called there, if it runs as one kernel when ops run one by one and the frontend
        knows it; else "".

    >>> s = SourceLine.parse("model.py:12:4 (Block.layer_norm)")
    >>> s.place, s.function, s.name, str(s), bool(SourceLine())
    ('model.py:12:4', 'Block.layer_norm', 'layer_norm', 'model.py:12:4 (Block.layer_norm)', False)
    """

    place: str = ""
    function: str = ""
    call: str = ""

    def __bool__(self) -> bool:
        return bool(self.place or self.function)

    def __str__(self) -> str:
        return f"{self.place} ({self.function})" if self.function else self.place

    @property
    def name(self) -> str:
        """The function's own name, without the class or function that it is defined in."""
        return self.function.rpartition(".")[2]

    def from_root(self) -> SourceLine:
        """The line with its file relative to the folder that it is imported from, or to the working directory. If it is
        in neither, only the file's name is kept.

        >>> SourceLine("/home/ada/models/tiny.py:12:4").from_root().place
        'tiny.py:12:4'
        """
        at = Path(self.place)
        if not at.is_absolute():
            return self
        roots = [r for r in map(Path, (os.getcwd(), *sys.path)) if r.is_absolute() and at.is_relative_to(r)]
        nearest = max(roots, key=lambda r: len(r.parts), default=at.parent)
        return replace(self, place=at.relative_to(nearest).as_posix())

    @classmethod
    def parse(cls, text: str) -> SourceLine:
        """The inverse of ``str``."""
        m = _SOURCE.fullmatch(text)
        return cls(text) if m is None else cls(m[1], m[2])


NOWHERE = SourceLine()
"""No line of the user's program is known."""
NO_PLACE = Place()
"""The place of an op that no equation makes."""
