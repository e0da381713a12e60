"""Finds the trip counts of while loops in compiled HLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pase.hlo.module import Computation, Instruction, Module

__all__ = ["trip_count"]

# The abstract value of an instruction, reduced to what a trip count depends on: an integer, the loop's state (or an
# element of it) plus an integer, a tuple, a comparison, or None for anything else.
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
    """A tuple with lazily evaluated elements: a loop's state has many elements, and only its counter is needed."""

    element: Callable[[int], LoopValue]


# Ops that return their operand's value unchanged.
_PLAIN = {"copy", "bitcast", "convert", "reshape", "optimization-barrier", "opt-barrier"}

_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a while loop: as the compiler recorded it, or else from its start, step and bound.

    None if neither is known, as in a loop whose condition depends on data.
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
    """Returns the trip count of ``for (i = start; i direction bound; i += step)``; None if it does not terminate.

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
    # Only integers, predicates, and tuples that may contain them matter; arrays are skipped.
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
