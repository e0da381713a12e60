"""How often a while loop of compiled HLO runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pase.hlo.module import Computation, Instruction, Module

__all__ = ["trip_count"]

# What an instruction computes, as far as counting a loop needs to know: a whole number; the loop's
# state (or element i of it) plus a whole number; a tuple; a comparison; None where it is something else.
LoopValue: TypeAlias = "int | _LoopState | _Compare | _Tuple | None"


@dataclass(frozen=True)
class _LoopState:
    """Element ``index`` of the loop's state (-1: the whole state), plus ``added``."""

    index: int
    added: int = 0


@dataclass(frozen=True)
class _Compare:
    direction: str
    left: LoopValue
    right: LoopValue


@dataclass(frozen=True)
class _Tuple:
    """A tuple whose elements are looked at one by one: a loop's state is wide, its counter one element."""

    element: Callable[[int], LoopValue]


# The value goes through unchanged.
_PLAIN = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "opt-barrier"}

_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a while loop: what the compiler noted, else counted from its start, step and bound.

    None where neither is to be had (a loop that runs until data says stop).
    """
    noted = loop.noted("known_trip_count")
    if noted is not None:
        return int(noted["n"])
    body, condition = module.called(loop)
    test = _value(module, condition, condition.root, [_LoopState(-1)])
    if not isinstance(test, _Compare):
        return None
    left, right, direction = test.left, test.right, test.direction
    if isinstance(right, _LoopState):
        left, right, direction = right, left, _MIRRORED[direction]
    if not (isinstance(left, _LoopState) and isinstance(right, int)):
        return None
    (initial,) = computation.operands(loop)
    stepped = _element(_value(module, body, body.root, [_LoopState(-1)]), left.index)
    started = _element(_value(module, computation, initial, []), left.index)
    if not (isinstance(stepped, _LoopState) and stepped.index == left.index and isinstance(started, int)):
        return None
    return _trips(started + left.added, stepped.added, right, direction)


def _trips(start: int, step: int, bound: int, direction: str) -> int | None:
    """Trips of ``for (i = start; i direction bound; i += step)``; None where it would not end.

    >>> _trips(0, 1, 5, "LT"), _trips(0, 2, 5, "LE"), _trips(9, -3, 0, "GT"), _trips(0, -1, 5, "LT")
    (5, 3, 3, None)
    """
    if direction == "NE":
        if start == bound:
            return 0
        trips, left = divmod(bound - start, step) if step else (-1, 0)
        return trips if trips > 0 and left == 0 else None
    if direction in ("GT", "GE"):
        start, step, bound, direction = -start, -step, -bound, _MIRRORED[direction]
    if direction not in ("LT", "LE"):
        return None
    end = bound + (direction == "LE")
    if start >= end:
        return 0
    return math.ceil((end - start) / step) if step > 0 else None


def _element(value: LoopValue, index: int) -> LoopValue:
    if index == -1:
        return value
    if isinstance(value, _Tuple):
        return value.element(index)
    if isinstance(value, _LoopState) and value.index == -1:
        return _LoopState(index)
    return None


def _value(module: Module, computation: Computation, i: Instruction, arguments: list[LoopValue]) -> LoopValue:
    # A counter, a test, or a tuple that may hold them; arrays are never looked into.
    if i.shape.dims or not (i.shape.dtype in ("tuple", "pred") or i.shape.dtype[0] in "su"):
        return None

    def operand(k: int) -> LoopValue:
        return _value(module, computation, computation.instructions[i.operands[k]], arguments)

    if i.opcode == "constant":
        return i.constant
    if i.opcode == "parameter":
        return arguments[i.index] if i.index < len(arguments) else None
    if i.opcode == "get-tuple-element":
        return _element(operand(0), i.index)
    if i.opcode == "tuple":
        return _Tuple(operand)
    if i.opcode in _PLAIN:
        return operand(0)
    if i.opcode in ("add", "subtract"):
        return _sum(operand(0), operand(1), 1 if i.opcode == "add" else -1)
    if i.opcode == "compare":
        return _Compare(i.direction, operand(0), operand(1))
    if i.opcode in ("fusion", "call"):
        (callee,) = module.called(i)
        return _value(module, callee, callee.root, [operand(k) for k in range(len(i.operands))])
    return None


def _sum(a: LoopValue, b: LoopValue, sign: int) -> LoopValue:
    if isinstance(a, int) and isinstance(b, int):
        return a + sign * b
    if isinstance(a, _LoopState) and isinstance(b, int):
        return _LoopState(a.index, a.added + sign * b)
    if isinstance(a, int) and isinstance(b, _LoopState) and sign == 1:
        return _LoopState(b.index, b.added + a)
    return None
