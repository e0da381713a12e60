"""Literals: the operands of an op that are plain numbers of the program, such as the 0.5 of ``x * 0.5``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeAlias

from pase.errors import PaseError

__all__ = ["Literals", "Number", "literal", "literals_text", "read_literals"]

Number: TypeAlias = "bool | int | float | complex"

Literals: TypeAlias = "tuple[Number | None, ...] | None"
"""One entry per operand of an op's function: the number, or None for the op's next read. The empty tuple if all
operands are read. None if the graph does not determine the operands, so that the op can only be priced."""

_MAX_DIGITS = 400
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


def literal(value: object) -> Number:
    """A number of Python, numpy or a framework as a Python number. There is one object for "not a number", so that
    equal ops are equal. Raises PaseError for anything else.

    >>> import numpy as np
    >>> literal(np.float32(0.5)), literal(np.array([3])), literal(True)
    (0.5, 3, True)
    """
    found = value.item() if hasattr(value, "item") else value
    if isinstance(found, float) and math.isnan(found):
        return math.nan
    if isinstance(found, (bool, int, float, complex)):
        return found
    raise PaseError(
        f"{value!r:.80} is not a number", fix="pass a tensor, a number, or None if it is not known"
    )


def literals_text(literals: Literals) -> str:
    """The literals of an op as text, which ``read_literals`` reads.

    >>> literals_text((None, 0.5, True, 1 - 2j)), literals_text(None)
    ('(_ 0.5 true 1.0-2.0j)', '?')
    """
    return "?" if literals is None else f"({' '.join(map(_text, literals))})"


def _text(x: Number | None) -> str:
    if x is None:
        return "_"
    if isinstance(x, bool):
        return str(x).lower()
    return f"{x.real!r}{x.imag:+}j" if isinstance(x, complex) else repr(x)


def read_literals(words: Sequence[str]) -> Literals:
    """The literals that these words of ``literals_text`` stand for. Raises PaseError for a word that is no number."""
    return tuple(map(_read, words))


def _read(word: str) -> Number | None:
    if word in ("_", "true", "false"):
        return None if word == "_" else word == "true"
    try:
        if len(word) > _MAX_DIGITS:
            raise ValueError
        if _INTEGER.fullmatch(word):
            return int(word)
        return literal(complex(word) if "j" in word else float(word))
    except ValueError:
        raise PaseError(f"'{word[:40]}' is not a number") from None
