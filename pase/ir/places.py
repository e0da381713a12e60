"""Where an op stands: the user's line, and the loops, branches and rematerialised regions around it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pase.errors import PaseError

__all__ = ["NOWHERE", "Scope", "ScopeKind", "SourceLine"]

ScopeKind = Literal["loop", "remat", "branch"]

_SCOPE = re.compile(rf"({'|'.join(get_args(ScopeKind))})(?::|(?=\d)|$)(.*)", re.DOTALL)
_SOURCE = re.compile(r"(.*) \(([^()]+)\)", re.DOTALL)


@dataclass(frozen=True)
class Scope:
    """A loop's body, a rematerialised region, or a branch of a conditional.

    path: in the paths of the equations inside, what they begin with.

    >>> str(Scope("loop", "3.")), str(Scope("loop", "while/body")), Scope.parse("remat3.1.")
    ('loop3.', 'loop:while/body', Scope(kind='remat', path='3.1.'))
    """

    kind: ScopeKind
    path: str

    def __str__(self) -> str:
        return f"{self.kind}{'' if self.path[:1].isdecimal() or not self.path else ':'}{self.path}"

    @classmethod
    def parse(cls, text: str) -> Scope:
        """The inverse of ``str``; PaseError where it is not a scope."""
        m = _SCOPE.fullmatch(text)
        if m is None:
            raise PaseError(f"'{text}' is not a scope: expected {', '.join(get_args(ScopeKind))} and a path")
        return cls(m[1], m[2])  # type: ignore[arg-type]


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program. function: the one that it stands in; "": not known. False where there is no line.

    >>> s = SourceLine.parse("model.py:12:4 (Block.layer_norm)")
    >>> s.place, s.function, s.name, str(s), bool(SourceLine())
    ('model.py:12:4', 'Block.layer_norm', 'layer_norm', 'model.py:12:4 (Block.layer_norm)', False)
    """

    place: str = ""
    function: str = ""

    def __bool__(self) -> bool:
        return bool(self.place or self.function)

    def __str__(self) -> str:
        return f"{self.place} ({self.function})" if self.function else self.place

    @property
    def name(self) -> str:
        """The function's own name, without the class or function that it is defined in."""
        return self.function.rpartition(".")[2]

    @classmethod
    def parse(cls, text: str) -> SourceLine:
        """The inverse of ``str``."""
        m = _SOURCE.fullmatch(text)
        return cls(text) if m is None else cls(m[1], m[2])


NOWHERE = SourceLine()
"""No line of the user's is known."""
