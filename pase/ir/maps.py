"""Access maps: how a loop nest walks the dims of a tensor, in einsum notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from pase.errors import PaseError

__all__ = ["AccessMap", "Walk", "Window"]

_WALK = re.compile(
    r"\s*(?:(?P<dim>[A-Za-z_]\w*)|1|\(\s*(?P<dims>[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)\s*\))"
    r"(?:@(?P<extent>[1-9]\d{0,8})(?:/(?P<stride>[1-9]\d{0,8}))?(?P<before>[+-][1-9]\d{0,8})?)?(?=\s|$)\s*",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sliding window over a tensor dim: ``extent`` elements (dilation included), moved by ``stride``.

    before: the elements of padding in front of the dim, where the first window begins. If it is negative, the first
        window skips that many elements.

    >>> Window(extent=3, before=1).border, Window(extent=3, stride=2).border, Window(extent=1, stride=2).border
    ((1, 1), (0, 1), (0, -1))
    """

    extent: int
    stride: int = 1
    before: int = 0

    @property
    def border(self) -> tuple[int, int]:
        """How many elements (before, after) a shard's windows reach beyond its borders. A negative number means that
        they leave that many of the shard's own elements unread.

        A shard has one window per stride. Its last window ends ``extent - stride`` elements after the place where the
        next shard's first window would begin.
        """
        return self.before, self.extent - self.stride - self.before

    @property
    def halo(self) -> int:
        """The number of elements that a shard reads from its neighbours."""
        return sum(max(n, 0) for n in self.border)


@dataclass(frozen=True)
class Walk:
    """How one tensor dim is walked: by iteration dims, major to minor, possibly under a window."""

    dims: tuple[str, ...] = ()
    window: Window | None = None

    def __str__(self) -> str:
        body = self.dims[0] if len(self.dims) == 1 else f"({' '.join(self.dims)})" if self.dims else "1"
        if self.window is None:
            return body
        w = self.window
        stride, before = f"/{w.stride}" if w.stride != 1 else "", f"{w.before:+}" if w.before else ""
        return f"{body}@{w.extent}{stride}{before}"


@dataclass(frozen=True)
class AccessMap:
    """One walk per tensor dim.

    >>> m = AccessMap.parse("b (h k) x@3/2+1 1")
    >>> m.walks[1].dims, m.walks[2].window.halo, str(m)
    (('h', 'k'), 1, 'b (h k) x@3/2+1 1')
    """

    walks: tuple[Walk, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.walks)) if self.walks else "."

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """All iteration dims that the map walks, in order."""
        return tuple(d for w in self.walks for d in w.dims)

    @classmethod
    def of(cls, *names: str | tuple[str, ...]) -> AccessMap:
        """One walk per argument: a dim, or a tuple of dims."""
        return cls(tuple(Walk(n if isinstance(n, tuple) else (n,)) for n in names))

    @classmethod
    def parse(cls, text: str) -> AccessMap:
        if text.strip() == ".":
            return cls(())
        walks: list[Walk] = []
        position = 0
        while position < len(text):
            m = _WALK.match(text, position)
            if m is None:
                raise PaseError(
                    f"cannot read '{text[position:]}'",
                    where=f"access map '{text}'",
                    fix="write a walk as DIM, (DIM DIM) or 1, optionally followed by @EXTENT or @EXTENT/STRIDE "
                    "and then +PADDING",
                )
            names = (m["dim"],) if m["dim"] else tuple((m["dims"] or "").split())
            extent, stride, before = (
                int(m[k] or default) for k, default in (("extent", 0), ("stride", 1), ("before", 0))
            )
            walks.append(Walk(names, Window(extent=extent, stride=stride, before=before) if extent else None))
            position = m.end()
        return cls(tuple(walks))
