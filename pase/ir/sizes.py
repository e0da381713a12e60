"""Sizes: integers, or sympy expressions over named symbols such as a batch size.

Symbols are positive integers. Text is parsed by a small grammar of its own, because ``sympify`` would evaluate it as
code.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from pase.errors import PaseError

if TYPE_CHECKING:
    import sympy

__all__ = ["Size", "bind_size", "free_symbols", "is_one", "parse_size", "product", "quotient", "symbol"]

Size: TypeAlias = "int | sympy.Expr"

_MAX_TEXT = 400
_MAX_TERMS = 200
_MAX_DIGITS = 18


def symbol(name: str) -> sympy.Expr:
    """The positive integer symbol with this name."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def product(sizes: Iterable[Size]) -> Size:
    """The product of the sizes.
    >>> product([2, 3, 4])
    24
    """
    return math.prod(sizes)  # type: ignore[arg-type,return-value]


def quotient(a: Size, b: Size) -> Size | None:
    """a / b if b divides a exactly (for every value of the symbols), else None.

    >>> quotient(12, 4), quotient(12, 5)
    (3, None)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    import sympy

    q = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if sympy.denom(sympy.together(q)) != 1:
        return None
    return int(q) if q.is_Integer else q


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def free_symbols(sizes: Iterable[Size]) -> set[str]:
    return {s.name for x in sizes if not isinstance(x, int) for s in x.free_symbols}  # type: ignore[attr-defined]


def bind_size(size: Size, values: Mapping[str, int]) -> Size:
    """Replaces symbols by integers. Symbols without a value stay symbolic.

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
            f"size {size} is {out} for {dict(values)}, which is not a whole number", fix="bind other values"
        )
    return out


def parse_size(text: str) -> Size:
    """Parses an integer or an expression with + - * // % ** (or ^), floor, max and min over symbols.

    It reads what sympy prints and what JAX prints for symbolic dims.

    >>> parse_size("64"), str(parse_size("2*b + 1")), parse_size("floordiv(4*b, 2)") == 2 * symbol("b")
    (64, '2*b + 1', True)
    """
    text = text.strip()
    if text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS:
        return int(text)
    if len(text) > _MAX_TEXT:
        raise PaseError(
            f"a size expression has {len(text)} characters", fix=f"write at most {_MAX_TEXT} characters"
        )
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise PaseError(f"'{text}' is not a size", fix="write an integer or an expression such as 2*b") from e
    if _terms(tree) > _MAX_TERMS:
        raise PaseError(
            f"the size '{text}' is too large: multiplied out, it has more than {_MAX_TERMS} terms",
            fix="write a simpler expression",
        )
    out = _evaluate(tree, text)
    if isinstance(out, int):
        return out
    return int(out) if out.is_Integer else out


def _terms(tree: ast.expr) -> float:
    """An upper bound on the number of terms after multiplying out. Limiting it keeps parsing fast."""
    match tree:
        case ast.BinOp(left=a, op=ast.Mult() | ast.FloorDiv() | ast.Mod() | ast.Div(), right=b):
            return _terms(a) * _terms(b)
        case ast.BinOp(left=a, op=ast.Pow(), right=ast.Constant(value=int(n))):
            return _terms(a) ** max(min(n, 64), 1)
        case ast.BinOp(left=a, right=b):
            return _terms(a) + _terms(b)
        case ast.UnaryOp(operand=a):
            return _terms(a)
        case ast.Call(args=args):
            return max(map(_terms, args), default=1)
    return 1


_CALLS = {
    "floordiv": "//",
    "floor_div": "//",
    "mod": "%",
    "Mod": "%",
    "max": "max",
    "Max": "max",
    "min": "min",
    "Min": "min",
    "floor": "floor",
    "ceiling": "ceiling",
}


def _evaluate(tree: ast.expr, text: str, exact: bool = True) -> Size:
    """Evaluates a parsed expression.

    exact: whether the value must be a whole number; inside floor and ceiling it need not be.
    """
    import sympy

    def floor_div(a: Size, b: Size) -> Size:
        if b == 0:
            raise PaseError(f"'{text}' is not a size: it divides by 0")
        q = quotient(a, b)
        return sympy.floor(sympy.sympify(a) / b) if q is None else q

    match tree:
        case ast.Constant(value=int(v)) if not isinstance(v, bool):
            if len(str(v)) > _MAX_DIGITS:
                raise PaseError(f"the size '{text}' is too large", fix=f"write at most {_MAX_DIGITS} digits")
            return v
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_evaluate(a, text, exact)
        case ast.BinOp(left=a, op=op, right=b):
            x = _evaluate(a, text, exact)
            y = _evaluate(b, text, exact)
            match op:
                case ast.Add():
                    return x + y
                case ast.Sub():
                    return x - y
                case ast.Mult():
                    return x * y
                case ast.FloorDiv():
                    return floor_div(x, y)
                case ast.Mod() if y != 0:
                    return sympy.Mod(x, y)
                case ast.Div() if not exact and y != 0:
                    return sympy.sympify(x) / y
                case ast.Pow() if isinstance(y, int) and 0 <= y <= 16:
                    return x**y
        case ast.Call(func=ast.Name(id=f), args=[_, *_] as args, keywords=[]) if f in _CALLS:
            rounded = f in ("floor", "ceiling")
            values = [_evaluate(a, text, exact and not rounded) for a in args]
            match _CALLS[f], values:
                case "max", _:
                    return sympy.Max(*values)
                case "min", _:
                    return sympy.Min(*values)
                case "floor", [x]:
                    return sympy.floor(x)
                case "ceiling", [x]:
                    return sympy.ceiling(x)
                case "//", [x, y]:
                    return floor_div(x, y)
                case "%", [x, y] if y != 0:
                    return sympy.Mod(x, y)
    raise PaseError(
        f"'{text}' is not a size", fix="write integers and symbols with + - * // % **, floor, max and min"
    )
