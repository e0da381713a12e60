"""Activation functions that frameworks have as one op, written as the functions into which ``jax.nn`` expands them.

A model therefore has the same FLOPs, and keeps the same tensors for backward, whichever framework it comes from.
"""

from __future__ import annotations

from collections.abc import Callable

from pase.ir import Tensor, functions
from pase.ir.functions import FUNCTIONS
from pase.ops import nests
from pase.ops.builder import GraphBuilder
from pase.ops.composites import apply
from pase.registry import Registry

__all__ = ["ACTIVATIONS", "Activation"]

Activation = Callable[[GraphBuilder, Tensor], Tensor]

ACTIVATIONS: Registry[Activation] = Registry("activation function")


def _compare(b: GraphBuilder, x: Tensor) -> Tensor:
    """Compares x with a number."""
    return nests.elementwise(b, FUNCTIONS["gt"], [x], ["bool"])[0]


def _select(b: GraphBuilder, condition: Tensor, *values: Tensor) -> Tensor:
    """Selects one of the values. A value that is a number is part of the op and not listed."""
    return nests.elementwise(b, functions.SELECT, [condition, *values], [values[0].dtype])[0]


@ACTIVATIONS.register("relu")
def relu(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MAX, x)


@ACTIVATIONS.register("relu6")
def relu6(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MIN, relu(b, x))


@ACTIVATIONS.register("leaky_relu")
def leaky_relu(b: GraphBuilder, x: Tensor) -> Tensor:
    return _select(b, _compare(b, x), apply(b, functions.MUL, x), x)


@ACTIVATIONS.register("sigmoid")
def sigmoid(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.SIGMOID, x)


@ACTIVATIONS.register("tanh")
def tanh(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.TANH, x)


@ACTIVATIONS.register("elu")
def elu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x where x > 0, else a (exp(x) - 1). The exponential is taken of 0 where x > 0."""
    inside = _select(b, _compare(b, x), x)
    below = apply(b, functions.MUL, apply(b, FUNCTIONS["expm1"], inside))
    return _select(b, _compare(b, x), below, x)


@ACTIVATIONS.register("selu")
def selu(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MUL, elu(b, x))


@ACTIVATIONS.register("celu")
def celu(b: GraphBuilder, x: Tensor) -> Tensor:
    """max(x, 0) + a (exp(min(x, 0) / a) - 1)."""
    below = apply(b, FUNCTIONS["expm1"], apply(b, functions.DIV, apply(b, functions.MIN, x)))
    return apply(b, functions.ADD, relu(b, x), apply(b, functions.MUL, below))


@ACTIVATIONS.register("softplus")
def softplus(b: GraphBuilder, x: Tensor) -> Tensor:
    """log(1 + exp(x)), as logaddexp(x, 0)."""
    top, difference = relu(b, x), apply(b, functions.SUB, x)
    (unequal,) = nests.elementwise(b, FUNCTIONS["ne"], [difference, difference], ["bool"])
    total = apply(b, functions.ADD, x)
    small = apply(b, functions.EXP, apply(b, functions.NEG, apply(b, FUNCTIONS["abs"], difference)))
    return _select(b, unequal, apply(b, functions.ADD, top, apply(b, functions.LOG1P, small)), total)


@ACTIVATIONS.register("softsign")
def softsign(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.DIV, x, apply(b, functions.ADD, apply(b, FUNCTIONS["abs"], x)))


@ACTIVATIONS.register("gelu")
def gelu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x/2 erfc(-x/√2)."""
    tail = apply(b, FUNCTIONS["erfc"], apply(b, functions.MUL, apply(b, functions.NEG, x)))
    return apply(b, functions.MUL, apply(b, functions.MUL, x), tail)


@ACTIVATIONS.register("gelu_tanh")
def gelu_tanh(b: GraphBuilder, x: Tensor) -> Tensor:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    cubed = apply(b, functions.MUL, apply(b, functions.INTEGER_POW, x))
    inside = apply(b, functions.MUL, apply(b, functions.ADD, x, cubed))
    gate = apply(b, functions.MUL, apply(b, functions.ADD, tanh(b, inside)))
    return apply(b, functions.MUL, x, gate)


@ACTIVATIONS.register("silu")
def silu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x sigmoid(x), also called swish."""
    return apply(b, functions.MUL, x, sigmoid(b, x))


@ACTIVATIONS.register("quick_gelu")
def quick_gelu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return apply(b, functions.MUL, x, sigmoid(b, apply(b, functions.MUL, x)))


@ACTIVATIONS.register("mish")
def mish(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MUL, x, tanh(b, softplus(b, x)))


@ACTIVATIONS.register("hard_sigmoid")
def hard_sigmoid(b: GraphBuilder, x: Tensor) -> Tensor:
    """relu6(x + 3) / 6: linear between 0 and 1."""
    return apply(b, functions.DIV, relu6(b, apply(b, functions.ADD, x)))


@ACTIVATIONS.register("hard_silu")
def hard_silu(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MUL, x, hard_sigmoid(b, x))
