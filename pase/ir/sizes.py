"""Sizes: integers, or sympy expressions over named symbols such as a batch size.

Symbols are positive integers. Text is parsed by a small grammar of its own: ``sympify`` would be eval.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.errors import PaseError

if TYPE_CHECKING:
    import sympy

__all__ = ["Size", "bind_size", "free_symbols", "is_one", "parse_size", "product", "quotient", "symbol"]

Size: TypeAlias = "int | sympy.Expr"

_MAX_TEXT = 400


def symbol(name: str) -> sympy.Expr:
    """The positive integer symbol of this name."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def product(sizes: Iterable[Size]) -> Size:
    """
    >>> product([2, 3, 4])
    24
    """
    return math.prod(sizes)  # type: ignore[arg-type,return-value]


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where b divides a exactly (for every value of the symbols), else None.

    >>> quotient(12, 4), quotient(12, 5)
    (3, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    import sympy

    q = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if sympy.denom(q) != 1:
        return None
    return int(q) if q.is_Integer else q


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def free_symbols(sizes: Iterable[Size]) -> set[str]:
    return {s.name for x in sizes if not isinstance(x, int) for s in x.free_symbols}  # type: ignore[attr-defined]


def bind_size(size: Size, values: Mapping[str, int]) -> Size:
    """Put integers in the place of symbols; what is not named stays symbolic.

    >>> bind_size(parse_size("2*b + 1"), {"b": 4})
    9
    """
    if isinstance(size, int):
        return size
    out = size.subs({symbol(k): v for k, v in values.items()})
    if out.is_Integer:
        return int(out)
    if out.is_number:
        raise PaseError(
            f"size {size} is {out} for {dict(values)}: a size must be a whole number; change the binding"
        )
    return out


def parse_size(text: str) -> Size:
    """Read an integer or an expression with + - * // % max min over symbols.

    >>> parse_size("64"), str(parse_size("2*b + 1"))
    (64, '2*b + 1')
    """
    text = text.strip()
    if text.isdecimal():
        return int(text)
    if len(text) > _MAX_TEXT:
        raise PaseError(f"size expression of {len(text)} characters; at most {_MAX_TEXT} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError) as e:
        raise PaseError(f"'{text}' is not a size: write an integer or an expression such as 2*b") from e
    return _evaluate(tree, text)


def _evaluate(tree: ast.expr, text: str) -> Size:
    import sympy

    def floor_div(a: Any, b: Any) -> Any:
        q = quotient(a, b)
        return sympy.floor(sympy.sympify(a) / b) if q is None else q

    match tree:
        case ast.Constant(value=int(v)) if not isinstance(v, bool):
            return v
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_evaluate(a, text)  # type: ignore[operator]
        case ast.BinOp(left=a, op=op, right=b):
            x: Any = _evaluate(a, text)
            y: Any = _evaluate(b, text)
            match op:
                case ast.Add():
                    return x + y
                case ast.Sub():
                    return x - y
                case ast.Mult():
                    return x * y
                case ast.FloorDiv():
                    return floor_div(x, y)
                case ast.Mod():
                    return x % y
                case ast.Pow() if isinstance(y, int) and 0 <= y <= 16:
                    return x**y
        case ast.Call(func=ast.Name(id=f), args=[a, b], keywords=[]) if f in (
            "floordiv",
            "mod",
            "max",
            "min",
            "floor_div",
        ):
            x, y = _evaluate(a, text), _evaluate(b, text)
            match f:
                case "mod":
                    return x % y
                case "max":
                    return sympy.Max(x, y)
                case "min":
                    return sympy.Min(x, y)
            return floor_div(x, y)
        case ast.Call(
            func=ast.Name(id="floor"), args=[ast.BinOp(left=a, op=ast.Div(), right=b)], keywords=[]
        ):
            return floor_div(_evaluate(a, text), _evaluate(b, text))
    raise PaseError(f"'{text}' is not a size: integers, symbols, + - * // %, max and min are read")
