"""What ops compute: one table of functions, to which every frontend maps its framework's op names.

An op's cost, gradient and memory follow from its ``Function``, never from its name. A frontend that needs a function
which does not exist adds it here, or registers it in ``FUNCTIONS`` next to the rule that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pase.registry import Registry

__all__ = ["BY_KIND", "FUNCTIONS", "Function", "Listed", "Needs"]

Needs = Literal["nothing", "operands", "factors", "choice", "chosen", "result", "both"]
"""What the derivative of a function reads of the values of forward:

nothing: the function is linear, so the operand's gradient is the result's gradient after a move, a sum, a cast or a
    multiplication by a number;
operands: all operands;
factors: each operand's gradient is the result's gradient times the other operands; a single operand is multiplied by a
    number, so nothing is needed;
choice: the operands that are not floating point and determine where the gradient goes, such as a condition or an index;
chosen: the results that are not floating point, namely the places that the function found;
result: the result itself;
both: operands and result."""

Listed = Literal["own", "needs", "both"]

_REPEATED_BELOW = 4.0
"""From this many FLOPs per point on, a compiler keeps a value rather than computes it a second time. XLA considers
division, roots and transcendental functions expensive (``InstructionFusion::IsExpensive``)."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function of an op's operands, applied point by point or over a loop nest.

    flops: FLOPs per point. Simple arithmetic counts as one, a division or a root as four, and a transcendental function
        as ten, as on a GPU's special-function path.
    needs: which operands and results backward needs.
    differentiable: whether a gradient passes through it.
    expensive: whether a compiler keeps its result rather than runs it again inside a reader's fusion.
    hands_on: each operand's gradient is the result's gradient unchanged or negated, so an eager framework launches no
        kernel for it.
    boolean: the result is true or false.
    listed: what JAX lists as the residuals of a non-linear elementwise op. A compiler keeps exactly these only inside a
        loop. "own": for each operand with a gradient, an array of the result's size by which backward multiplies;
        "needs": what ``needs`` says; "both": both of these.
    operands: the least and the greatest number of operands, literals included (None: any number); None if the number
        is not fixed, or if the function has no definition by its operands alone.
    scratch: how many arrays of the result's size PyTorch's formula of the derivative makes on the way to the operands'
        gradients. They live at once with these.
    """

    name: str
    flops: float = 1.0
    needs: Needs = "operands"
    differentiable: bool = True
    expensive: bool = False
    hands_on: bool = False
    boolean: bool = False
    listed: Listed = "own"
    operands: tuple[int, int | None] | None = None
    scratch: float = 0.0

    @property
    def linear(self) -> bool:
        """Whether the function is linear in all its operands taken together."""
        return self.differentiable and self.needs == "nothing"


FUNCTIONS: Registry[Function] = Registry("function")

_OPERANDS: dict[str, tuple[int, int | None]] = {
    name: count
    for names, count in {
        "neg square abs sign one_minus_square real imag conj cast copy stop_gradient bitcast": (1, 1),
        "is_finite is_nan is_inf is_false floor ceil round trunc not population_count clz": (1, 1),
        "sqrt rsqrt cbrt exp exp2 expm1 log log2 log10 log1p sigmoid tanh erf erfc erf_inv": (1, 1),
        "sin cos tan sinh cosh asin acos atan asinh acosh atanh lgamma digamma": (1, 1),
        "bessel_i0 bessel_i0e bessel_i1 bessel_i1e dawsn expint spence": (1, 1),
        "reciprocal": (1, 2),
        "passed sub div div_no_nan rem mod floor_div trunc_div pow integer_pow atan2 complex nextafter xlogy xlog1py": (
            2,
            2,
        ),
        "eq ne lt le gt ge shift_left shift_right shift_right_logical mulhi": (2, 2),
        "polygamma zeta igamma igammac igamma_grad random_gamma_grad": (2, 2),
        "add mul max min all_of any_of and or xor": (2, None),
        "clamp where reduce_precision add_scaled incomplete_beta": (3, 3),
        "select": (3, None),
    }.items()
    for name in names.split()
}
"""Numbers of operands. The definitions of functions whose operands have roles:

reciprocal: 1 / x; with two operands, a number divided by x.
div_no_nan: the quotient, and 0 where the divisor is 0.
mod: the remainder with the sign of the divisor; rem: with the sign of the dividend.
integer_pow: x, and the exponent as a literal. polygamma: the order, then x. reduce_precision: x, the bits of the
    exponent, the bits of the mantissa.
add_scaled: x + c y, of x, y and c.
passed: x, of x and y, with the derivative of y.
clamp: the lower bound, x, the upper bound.
where: a condition, the value where it is true, the value where it is false. select: an index, then the values from
    which it selects; false is 0.
all_of, any_of: whether all, or any, of the operands are not zero.
round: to the nearest integer, halves to even."""

_SCRATCH = {
    name: arrays
    for names, arrays in {
        "abs exp2 expm1 log2 log10 log1p sin sinh cosh lgamma digamma polygamma bessel_i0": 1.0,
        "max min": 1.5,
        "xlogy": 1.75,
        "sqrt rsqrt reciprocal square integer_pow cos tan atan div div_no_nan mod rem cumsum": 2.0,
        "asinh acosh atanh": 3.0,
        "erf erfc erf_inv asin bessel_i0e zeta": 4.0,
        "pow bessel_i1": 4.25,
        "acos atan2": 5.0,
        "bessel_i1e": 6.25,
        "igamma": 7.0,
        "igammac": 8.0,
    }.items()
    for name in names.split()
}
"""Function.scratch (``tests/memory/test_gradients.py`` measures it). Roots count as powers with an exponent do."""


def _add(
    words: str,
    flops: float = 1.0,
    needs: Needs = "operands",
    *,
    differentiable: bool = True,
    expensive: bool | None = None,
    hands_on: bool = False,
    boolean: bool = False,
    listed: Listed = "own",
) -> Function:
    """Registers functions with equal properties, one for each name in ``words``, and returns the last one."""
    if expensive is None:
        expensive = flops >= _REPEATED_BELOW
    for name in words.split():
        f = Function(
            name=name,
            flops=flops,
            needs=needs,
            differentiable=differentiable,
            expensive=expensive,
            hands_on=hands_on,
            boolean=boolean,
            listed=listed,
            operands=_OPERANDS.get(name),
            scratch=_SCRATCH.get(name, 0.0),
        )
        FUNCTIONS.add(name, f)
    return f


# Point by point: simple arithmetic.
ADD = _add("add", needs="nothing", hands_on=True)
SUB = _add("sub", needs="nothing", hands_on=True)
ADD_SCALED = _add("add_scaled", needs="nothing", hands_on=True)
NEG = _add("neg", needs="nothing")
MUL = _add("mul", needs="factors")
SQUARE = _add("square")
MAX = _add("max")
MIN = _add("min")
SELECT = _add("select", needs="choice")
WHERE = _add("where", needs="choice")
CLAMP = _add("clamp", 2.0)
_add("one_minus_square polynomial", 2.0)
_add("abs sign")
_add("real imag conj complex", needs="nothing")
# Functions that move or cast a value.
_add("reduce_precision", 0.0, "nothing")
CAST = _add("cast", 0.0, "nothing")
COPY = _add("copy", 0.0, "nothing", hands_on=True)
_add("passed", 0.0, "nothing", hands_on=True)
STOP_GRADIENT = _add("stop_gradient", 0.0, "nothing", differentiable=False)
_add("bitcast", 0.0, "nothing", differentiable=False)
# Comparisons and logic.
EQUAL = _add("eq", needs="nothing", differentiable=False, boolean=True)
_add("ne lt le gt ge is_finite is_nan is_inf", needs="nothing", differentiable=False, boolean=True)
_add("all_of any_of is_false", needs="nothing", differentiable=False, boolean=True)
FLOOR = _add("floor", needs="nothing", differentiable=False)
FLOOR_DIV = _add("floor_div", needs="nothing", differentiable=False)
_add("and or xor not ceil round trunc trunc_div nextafter", needs="nothing", differentiable=False)
_add(
    "shift_left shift_right shift_right_logical population_count clz mulhi bucketize",
    needs="nothing",
    differentiable=False,
)
# Divisions and roots.
DIV = _add("div", 4.0, "factors")
_add("div_no_nan", 4.0, "factors")
_add("rem mod", 4.0)
RECIPROCAL = _add("reciprocal", 4.0, "result")
INTEGER_POW = _add("integer_pow", 4.0, expensive=False)
RSQRT = _add("rsqrt", 4.0, "result")
SQRT = _add("sqrt", 4.0, "result")
_add("cbrt", 4.0, "result")
# Transcendental functions.
EXP = _add("exp", 10.0, "result", listed="needs")
LOG = _add("log", 10.0, listed="needs")
_add("log10", 10.0, listed="needs")
SIGMOID = _add("sigmoid", 10.0, "result")
TANH = _add("tanh", 10.0, "result", listed="both")
ERF = _add("erf", 10.0)
POW = _add("pow", 10.0)
LOG1P = _add("log1p", 10.0)
_add("log2", 10.0)
_add("exp2", 10.0, "result", listed="needs")
_add("expm1 erf_inv", 10.0, "result")
_add("sin cos tan sinh cosh asin acos atan asinh acosh atanh erfc atan2", 10.0)
# Special functions, as series.
_add("lgamma digamma polygamma zeta igamma igammac igamma_grad random_gamma_grad incomplete_beta", 40.0)
_add("bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j bessel_k bessel_y dawsn expint fresnel spence", 40.0)
_add("xlogy xlog1py", 10.0)
# Gradients that are ops of their own in a framework's graph.
_add("gradient_of_max")
_add("gradient_of_result", 4.0)
_add("gradient_of_exp", 10.0)
# Over one or more dims.
SUM = _add("reduce_sum", needs="nothing")
REDUCE_MAX = _add("reduce_max")
_add("reduce_min reduce_prod reduce")
_add("reduce_and reduce_or reduce_xor argmax argmin", needs="nothing", differentiable=False)
WINDOW_SUM = _add("reduce_window_sum", needs="nothing")
WINDOW_MAX = _add("reduce_window_max")
_add("reduce_window_min reduce_window")
CUMSUM = _add("cumsum", needs="nothing")
_add("cumprod cummax cummin cumlogsumexp")
SORT = _add("sort", 20.0)
ARGSORT = _add("argsort", 20.0, needs="nothing", differentiable=False)
BISECT = _add("bisect", needs="nothing", differentiable=False)
TOP_K = _add("top_k", 10.0, needs="chosen")
# Generated values.
IOTA = _add("iota", needs="nothing", differentiable=False)
RANDOM = _add("random", needs="nothing", differentiable=False, expensive=True)
# Rounding to a grid: the gradient passes unchanged if the operand is within the range of the grid.
QUANTIZE = _add("quantize", 6.0, needs="nothing", differentiable=False)
_add("dequantize", 2.0, needs="nothing")
_add("fake_quantize", 8.0)

# Functions that are fully described by the loop nest.
MATMUL = _add("matmul", 2.0)
CONV = _add("conv", 2.0)
GATHER = _add("gather", needs="choice")
SCATTER = _add("scatter", needs="choice")
SCATTER_ADD = _add("scatter_add", needs="choice")
_add("scatter_mul scatter_min scatter_max")
ATTENTION = _add("attention", 2.0, "both")
CAUSAL_ATTENTION = _add("causal_attention", 2.0, "both")
MOVE = _add("move", 0.0, "nothing")
UNSTACK = _add("unstack", 0.0, "nothing")
OPAQUE = _add("opaque", 0.0)
FFT = _add("fft", 0.0, "nothing")
CARRY = _add("carry", 0.0, "nothing")
_WHOLE = ("parameter", "input", "constant", "cotangent", "gradient", "output")
_LEAF = {name: _add(name, 0.0, "nothing") for name in _WHOLE}

BY_KIND: dict[str, Function] = {
    "matmul": MATMUL,
    "conv": CONV,
    "gather": GATHER,
    "scatter": SCATTER,
    "view": MOVE,
    "copy": COPY,
    "attention": ATTENTION,
    "opaque": OPAQUE,
    "carry": CARRY,
    **_LEAF,
}
"""Kind of loop nest -> the function of all ops of that kind. Ops of other kinds name their function."""
