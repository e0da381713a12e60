"""Activation functions that frameworks have as one op, written as the functions into which ``jax.nn`` expands them.

A model therefore has the same FLOPs, and keeps the same tensors for backward, whichever framework it comes from. Their
numbers are those of ``jax.nn``, unless a framework passes its own. A number that is None is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pase.ir import Tensor, functions
from pase.ir.functions import FUNCTIONS
from pase.ir.literals import Number
from pase.ops import nests
from pase.ops.builder import GraphBuilder
from pase.ops.composites import apply
from pase.registry import Registry

__all__ = ["ACTIVATIONS", "Activation"]


Activation = Callable[..., Tensor]
"""Adds the ops of an activation, from a builder, a tensor and, in place of its defaults, its numbers."""

ACTIVATIONS: Registry[Activation] = Registry("activation function")


def _above(b: GraphBuilder, x: Tensor, threshold: float | None = 0.0) -> Tensor:
    """Whether x is above a number."""
    return nests.elementwise(b, FUNCTIONS["gt"], [x, threshold], ["bool"])[0]


def _select(b: GraphBuilder, condition: Tensor, *values: Tensor | Number | None) -> Tensor:
    """The second value where the condition is true, and the first one elsewhere."""
    dtype = next(v.dtype for v in values if isinstance(v, Tensor))
    return nests.elementwise(b, functions.SELECT, [condition, *values], [dtype])[0]


@ACTIVATIONS.register("relu")
def relu(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MAX, x, 0.0)


@ACTIVATIONS.register("relu6")
def relu6(b: GraphBuilder, x: Tensor, most: float | None = 6.0) -> Tensor:
    return apply(b, functions.MIN, relu(b, x), most)


@ACTIVATIONS.register("leaky_relu")
def leaky_relu(b: GraphBuilder, x: Tensor, slope: float | None = 0.01) -> Tensor:
    return _select(b, _above(b, x), apply(b, functions.MUL, x, slope), x)


@ACTIVATIONS.register("sigmoid")
def sigmoid(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.SIGMOID, x)


@ACTIVATIONS.register("tanh")
def tanh(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.TANH, x)


@ACTIVATIONS.register("elu")
def elu(b: GraphBuilder, x: Tensor, alpha: float | None = 1.0) -> Tensor:
    """x where x > 0, else alpha (exp(x) - 1). The exponential is taken of 0 where x > 0."""
    inside = _select(b, _above(b, x), x, 0.0)
    below = apply(b, functions.MUL, apply(b, FUNCTIONS["expm1"], inside), alpha)
    return _select(b, _above(b, x), below, x)


@ACTIVATIONS.register("selu")
def selu(
    b: GraphBuilder,
    x: Tensor,
    alpha: float | None = 1.6732632423543772848170429916717,
    scale: float | None = 1.0507009873554804934193349852946,
) -> Tensor:
    """Klambauer et al., Self-Normalizing Neural Networks, 2017."""
    return apply(b, functions.MUL, elu(b, x, alpha), scale)


@ACTIVATIONS.register("celu")
def celu(b: GraphBuilder, x: Tensor, alpha: float | None = 1.0) -> Tensor:
    """max(x, 0) + alpha (exp(min(x, 0) / alpha) - 1)."""
    below = apply(b, FUNCTIONS["expm1"], apply(b, functions.DIV, apply(b, functions.MIN, x, 0.0), alpha))
    return apply(b, functions.ADD, relu(b, x), apply(b, functions.MUL, below, alpha))


@ACTIVATIONS.register("softplus")
def softplus(b: GraphBuilder, x: Tensor, zero: float | None = 0.0) -> Tensor:
    """log(1 + exp(x)), as logaddexp(x, 0)."""
    top, difference = apply(b, functions.MAX, x, zero), apply(b, functions.SUB, x, zero)
    (unequal,) = nests.elementwise(b, FUNCTIONS["ne"], [difference, difference], ["bool"])
    total = apply(b, functions.ADD, x, zero)
    small = apply(b, functions.EXP, apply(b, functions.NEG, apply(b, FUNCTIONS["abs"], difference)))
    return _select(b, unequal, apply(b, functions.ADD, top, apply(b, functions.LOG1P, small)), total)


@ACTIVATIONS.register("softsign")
def softsign(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.DIV, x, apply(b, functions.ADD, apply(b, FUNCTIONS["abs"], x), 1.0))


@ACTIVATIONS.register("gelu")
def gelu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x/2 erfc(-x/√2)."""
    tail = apply(b, FUNCTIONS["erfc"], apply(b, functions.MUL, apply(b, functions.NEG, x), math.sqrt(0.5)))
    return apply(b, functions.MUL, apply(b, functions.MUL, x, 0.5), tail)


@ACTIVATIONS.register("gelu_tanh")
def gelu_tanh(b: GraphBuilder, x: Tensor) -> Tensor:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    cubed = apply(b, functions.MUL, apply(b, functions.INTEGER_POW, x, 3), 0.044715)
    inside = apply(b, functions.MUL, apply(b, functions.ADD, x, cubed), math.sqrt(2.0 / math.pi))
    gate = apply(b, functions.MUL, apply(b, functions.ADD, tanh(b, inside), 1.0), 0.5)
    return apply(b, functions.MUL, x, gate)


@ACTIVATIONS.register("silu")
def silu(b: GraphBuilder, x: Tensor) -> Tensor:
    """x sigmoid(x), also called swish."""
    return apply(b, functions.MUL, x, sigmoid(b, x))


@ACTIVATIONS.register("quick_gelu")
def quick_gelu(b: GraphBuilder, x: Tensor, alpha: float | None = 1.702) -> Tensor:
    """x sigmoid(alpha x)."""
    return apply(b, functions.MUL, x, sigmoid(b, apply(b, functions.MUL, x, alpha)))


@ACTIVATIONS.register("mish")
def mish(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MUL, x, tanh(b, softplus(b, x)))


@ACTIVATIONS.register("hard_sigmoid")
def hard_sigmoid(b: GraphBuilder, x: Tensor, offset: float | None = 3.0, most: float | None = 6.0) -> Tensor:
    """min(max(x + offset, 0), most) / most: linear between 0 and 1."""
    return apply(b, functions.DIV, relu6(b, apply(b, functions.ADD, x, offset), most), most)


@ACTIVATIONS.register("hard_silu")
def hard_silu(b: GraphBuilder, x: Tensor) -> Tensor:
    return apply(b, functions.MUL, x, hard_sigmoid(b, x))
