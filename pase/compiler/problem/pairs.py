"""Parsers for NAME=VALUE input: sizes, places at which a value is returned, chances of branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pase.errors import PaseError

__all__ = ["parse_chances", "parse_layouts", "parse_places", "parse_sizes"]


def _pairs(given: Sequence[str] | None, flag: str, form: str) -> list[tuple[str, str]]:
    out = []
    for text in given or ():
        name, equals, value = text.rpartition("=")
        if not equals or not name.strip() or not value.strip():
            raise PaseError(f"'{text}' is not a pair", where=flag, fix=f"write {form}")
        out.append((name.strip(), value.strip()))
    return out


def _whole(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 18


def parse_sizes(given: Sequence[str] | None) -> dict[str, int]:
    """
    >>> parse_sizes(["batch=64", "seq=128"])
    {'batch': 64, 'seq': 128}
    """
    out: dict[str, int] = {}
    for name, size in _pairs(given, "--dim", form := "NAME=SIZE, for example --dim batch=64"):
        if not _whole(size):
            raise PaseError(f"'{name}={size}' has no whole number", where="--dim", fix=f"write {form}")
        out[name] = int(size)
    return out


def parse_places(given: Sequence[str] | None) -> dict[int, Any]:
    """Return batch argument -> the place of its next value: numbers and keys, outermost first, separated by dots.

    >>> parse_places(["0=1", "2=1.batch_stats"])
    {0: (1,), 2: (1, 'batch_stats')}
    """
    out: dict[int, Any] = {}
    for argument, place in _pairs(given, "--carry", form := "ARGUMENT=PLACE, for example --carry 1=1"):
        if not _whole(argument):
            raise PaseError(
                f"'{argument}={place}' does not start with a number", where="--carry", fix=f"write {form}"
            )
        out[int(argument)] = tuple(int(k) if _whole(k) else k for k in place.split("."))
    return out


def parse_chances(given: Sequence[str] | None) -> dict[str, tuple[float, ...]]:
    """
    >>> parse_chances(["cond0=0.9,0.1"])
    {'cond0': (0.9, 0.1)}
    """
    out: dict[str, tuple[float, ...]] = {}
    for name, shares in _pairs(given, "--chance", form := "NAME=CHANCE,CHANCE, as in --chance cond0=0.9,0.1"):
        try:
            out[name] = tuple(float(share) for share in shares.split(","))
        except ValueError as e:
            raise PaseError(
                f"'{name}={shares}' has a chance that is not a number", where="--chance", fix=f"write {form}"
            ) from e
    return out


def parse_layouts(given: Sequence[str] | None) -> dict[str, Any]:
    """Return name -> its layout, with an entry for each dim. A single axis is for the first dim alone.

    >>> parse_layouts(["blocks.*.wq=-,model", "batch=data", "x=data+model,?"])
    {'blocks.*.wq': (None, 'model'), 'batch': 'data', 'x': (('data', 'model'), Ellipsis)}
    """
    out: dict[str, Any] = {}
    form = "NAME=DIMS, for example --constrain 'blocks.*.wq=-,model'"
    for name, dims in _pairs(given, "--constrain", form):
        entries = [_entry(text.strip()) for text in dims.split(",")]
        if "" in entries:
            raise PaseError(f"'{name}={dims}' has an empty dim", where="--constrain", fix=f"write {form}")
        if name in out:
            raise PaseError(
                f"'{name}' is constrained twice", where="--constrain", fix="leave out one of them"
            )
        single = len(entries) == 1 and isinstance(entries[0], str)
        out[name] = entries[0] if single else tuple(entries)
    return out


def _entry(text: str) -> Any:
    if text in ("-", "?"):
        return None if text == "-" else ...
    return tuple(text.split("+")) if "+" in text else text
