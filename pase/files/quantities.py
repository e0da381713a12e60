"""Quantities as people write them ("80GiB", "50us", "25MB/s"), and factors ("0.5..2")."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pase.errors import PaseError

__all__ = [
    "bytes_text",
    "cost_text",
    "parse_bytes",
    "parse_count",
    "parse_factors",
    "parse_rate",
    "parse_seconds",
    "rounded_text",
]

_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_BYTES = {"": 1.0, "b": 1.0} | {
    f"{letter}{kind}": float(base**power)
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("ib", 1024), ("b", 1000))
}
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES_PER_S = {"b/s": 1.0, "mb/s": 1e6, "gb/s": 1e9, "gbit/s": 1e9 / 8}
_POINTS = 5


def rounded_text(x: float) -> str:
    """A number of three digits, without an exponent.
    >>> rounded_text(12345.6), rounded_text(2250.0), rounded_text(98.76)
    ('12,300', '2,250', '98.8')
    """
    return f"{float(f'{x:.3g}'):,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def bytes_text(n: float) -> str:
    """A number of bytes with a binary unit.
    >>> bytes_text(1536), bytes_text(80 * 2**30)
    ('1.5 KiB', '80 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.3g} {unit}" if abs(n) < 1000 else f"{n:.0f} {unit}"
        n /= 1024
    raise AssertionError


def cost_text(cost: float, unit: str) -> str:
    """
    >>> cost_text(0.0345, "s"), cost_text(2e-6, "s"), cost_text(1.2e12, "FLOP")
    ('34.5 ms', '2.00 µs', '1.2e+12 FLOP')
    """
    if unit != "s":
        return f"{cost:.4g} {unit}"
    if cost < 0:
        return f"-{cost_text(-cost, unit)}"
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if cost >= scale:
            return f"{cost / scale:.3g} {name}" if cost / scale >= 10 else f"{cost / scale:.2f} {name}"
    return "0" if cost == 0 else f"{cost * 1e6:.2g} µs"


def _parse(text: str, units: Mapping[str, float], refusal: PaseError, *, zero: bool = False) -> float:
    """The number times its unit (upper or lower case). Raises ``refusal`` if it is not a number above 0."""
    read = re.fullmatch(r"\s*([-+.\de]*\d\.?)\s*([a-z/]*)\s*", text.lower())
    try:
        value = float(read[1]) * units[read[2]] if read else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not (0 < value < math.inf or (zero and value == 0)):
        raise refusal
    return value


def parse_bytes(text: str, where: str, such_as: str = "80GiB or 16e9") -> float:
    """Parses a number of bytes above 0. where, such_as: the option, and examples of what it accepts, for the message.

    >>> parse_bytes("80GiB", "memory_limit") == 80 * 2**30, parse_bytes("16e9", "memory_limit")
    (True, 16000000000.0)
    """
    return _parse(text, _BYTES, PaseError(f"'{text}' is not a size", where=where, fix=f"write {such_as}"))


def parse_count(text: str, where: str) -> float:
    """Parses a number of things above 0.

    >>> parse_count("15T", "--tokens") == parse_count("15e12", "--tokens") == 15e12
    True
    """
    return _parse(
        text,
        _THOUSANDS,
        PaseError(f"'{text}' is not a number", where=where, fix="write it like 15T or 15e12"),
    )


def parse_seconds(text: str, where: str) -> float:
    """Parses seconds with their unit, such as "50us". They may be 0."""
    refusal = PaseError(f"'{text}' is not a time", where=where, fix="write it like 50us")
    return _parse(text, _SECONDS, refusal, zero=True)


def parse_rate(text: str, where: str) -> float:
    """Parses bytes per second, above 0.

    >>> parse_rate("25MB/s", "--wire")
    25000000.0
    """
    return _parse(
        text, _BYTES_PER_S, PaseError(f"'{text}' is not a bandwidth", where=where, fix="write it like 5GB/s")
    )


def parse_factors(text: str, where: str) -> tuple[float, ...]:
    """Parses factors above 0, and adds 1 to them: "0.5..2" (five, evenly spaced in the logarithm), "0.5..2:9" (9),
    "0.5,1,4".

    >>> parse_factors("0.25..4", "--vary")
    (0.25, 0.5, 1.0, 2.0, 4.0)
    >>> parse_factors("0.8,1.1", "--vary")
    (0.8, 1.0, 1.1)
    """
    span = re.fullmatch(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?::\s*(\d+))?\s*", text)
    if span is not None:
        low, high = sorted((float(span[1]), float(span[2])))
        count = int(span[3] or _POINTS)
        if count < 2:
            raise PaseError(
                f"a range cannot have {count} factors", where=where, fix="ask for 2 factors or more"
            )
        ratio = high / low if low > 0 else math.nan
        factors = [low * ratio ** (i / (count - 1)) for i in range(count)]
    elif re.fullmatch(rf"\s*{_NUMBER}(?:\s*,\s*{_NUMBER})*\s*", text):
        factors = [float(x) for x in re.findall(_NUMBER, text)]
    else:
        raise PaseError("its factors cannot be read", where=where, fix="write 0.5..2, 0.5..2:9 or 0.5,1,2")
    if not all(f > 0 for f in factors):
        raise PaseError("a factor is 0", where=where, fix="use factors above 0")
    return tuple(sorted({float(f"{f:.6g}") for f in (*factors, 1.0)}))
