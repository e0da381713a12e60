"""Weights that are functions of parameters, in PyTorch. Each makes f(module) -> a tensor of the shape, of about unit
size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from bench.composer.maker import Pattern
from bench.composer.torch_maker import TORCH_TRANSFORMS, TorchMaker, torch_transform
from bench.composer.weights import matrix

TensorGet = Callable[[Any], Tensor]
"""f(the module with the parameters) -> a weight."""


class RoundedThrough(torch.autograd.Function):
    """Rounds to quarters; the gradient passes straight through if the weight is small."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return (w * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return g * (w.abs() < 1.5)


class SwishOwnBackward(torch.autograd.Function):
    """x * sigmoid(x), which keeps only x for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))


def _no_grad_scale(w: Tensor) -> Tensor:
    with torch.no_grad():
        size = w.abs().mean() + 0.5
    return w / size


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda w: torch.exp(w * 0.5),
    "minus_exp": lambda a: -torch.exp(a * 0.5),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "square": torch.square,
    "cube": lambda w: w**3 * 0.3,
    "sin": torch.sin,
    "cos": lambda w: w.cos(),
    "rsqrt": lambda w: torch.rsqrt(w * w + 1),
    "sqrt": lambda w: (w * w + 0.1).sqrt(),
    "log1p": lambda w: torch.log1p(w * w),
    "reciprocal": lambda w: (1 + w * w).reciprocal(),
    "absolute": torch.abs,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda w: F.gelu(w, approximate="tanh"),
    "silu": F.silu,
    "erf": torch.erf,
    "arctan": torch.atan,
    "expm1": lambda w: torch.expm1(w * 0.3),
    "clamp": lambda w: w.clamp(-1, 1),
    "leaky": lambda w: F.leaky_relu(w, 0.1),
    "where": lambda w: torch.where(w > 0, w, 0.1 * w),
    "power": lambda w: (w.abs() + 0.1).pow(1.5),
    "sinc": torch.sinc,
    "logit": lambda w: torch.logit(torch.sigmoid(w) * 0.9 + 0.05),
    "hardtanh": F.hardtanh,
    "hardswish": lambda w: F.hardswish(w + 0.01),
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "softshrink": lambda w: F.softshrink(w, 0.2),
    "tanhshrink": F.tanhshrink,
    "threshold": lambda w: F.threshold(w, 0.1, 0.05),
    "relu6": F.relu6,
    "asinh": torch.asinh,
    "lerp": lambda w: torch.lerp(w, w.tanh(), 0.3),
    "addcmul": lambda w: torch.addcmul(w, w.sin(), w.cos(), value=0.5),
    "hypot": lambda w: torch.hypot(w, torch.ones_like(w)),
    "logaddexp": lambda w: torch.logaddexp(w, -w) - 0.5,
    "maximum": lambda w: torch.maximum(w, -0.3 * w),
    "xlogy": lambda w: torch.xlogy(w, 1 + w * w),
    "rounded": lambda w: w + (torch.round(w * 4) / 4 - w).detach(),
    "signed": lambda w: w.tanh() + (w.sign() - w.tanh()).detach(),
    "half_detached": lambda w: 0.5 * w + 0.5 * (w * w).detach(),
    "data": lambda w: w * w.data.abs(),
    "no_grad_scale": _no_grad_scale,
    "rounded_function": RoundedThrough.apply,
    "swish_function": SwishOwnBackward.apply,
    "in_place": lambda w: w.clone().mul_(0.5).tanh_(),
    "in_place_part": lambda w: torch.cat([w.clone().sin_().view(-1), w.new_zeros(1)])[:-1].view(w.shape),
}


def _elementwise(name: str) -> Pattern:
    def make(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
        own.a = m.param(*shape)
        return lambda own: ELEMENTWISE[name](own.a)

    return Pattern(make=make)


TORCH_TRANSFORMS.update({name: _elementwise(name) for name in ELEMENTWISE})

PARAMETRIZED: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm_all": lambda m: parametrizations.weight_norm(m, dim=None),
    "weight_norm_hook": torch.nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal_cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
}


@torch_transform()
def log_scaled(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A scale that is stored as its logarithm."""
    own.a, own.s = m.param(*shape), m.param(scale=0.3)
    return lambda own: own.a * own.s.exp()


@torch_transform()
def weight_norm(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A direction and a length."""
    own.v, own.g = m.param(*shape), m.param(shape[-1], scale=0.3, shift=1)
    dims = tuple(range(len(shape) - 1))

    def get(own: Any) -> Tensor:
        squares = own.v**2
        return own.g * own.v * torch.rsqrt((squares.sum(dims, keepdim=True) if dims else squares) + 1e-2)

    return get


@torch_transform()
def normalised(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A weight over its norm."""
    own.v, how = m.param(*shape), m.choose("norm", "vector_norm", "normalize", "max")

    def get(own: Any) -> Tensor:
        if how == "norm":
            return own.v / own.v.norm()
        if how == "vector_norm":
            return own.v / torch.linalg.vector_norm(own.v, dim=-1, keepdim=True)
        return F.normalize(own.v, dim=0) if how == "normalize" else own.v / own.v.abs().amax()

    return get


@torch_transform(matrix)
def standardised(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A weight minus its mean, over its standard deviation."""
    own.v, how = m.param(*shape), m.choose("var_mean", "std", "layer_norm")

    def get(own: Any) -> Tensor:
        if how == "layer_norm":
            return F.layer_norm(own.v, own.v.shape[-1:])
        if how == "std":
            return (own.v - own.v.mean(0)) / (own.v.std(0) + 0.1)
        var, mean = torch.var_mean(own.v, dim=0, unbiased=False)
        return (own.v - mean) / torch.sqrt(var + 0.1)

    return get


@torch_transform(matrix)
def centred(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A weight minus its mean."""
    own.v = m.param(*shape)
    return lambda own: own.v - own.v.mean(-1, keepdim=True)


@torch_transform()
def softmax(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Softmax of a weight, its logarithm, and softmin."""
    own.v, dim, of = m.param(*shape), m.choose(0, -1), m.choose(F.softmax, F.log_softmax, F.softmin)
    return lambda own: of(own.v, dim=dim) * 2


@torch_transform()
def cumulative(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Cumulative sums, products and maxima of a weight."""
    own.v, dim = m.param(*shape, scale=0.4), m.choose(0, -1)
    of = m.choose(
        lambda v: v.cumsum(dim),
        lambda v: torch.logcumsumexp(v, dim) * 0.5,
        lambda v: torch.cumprod(1 + 0.1 * v, dim),
        lambda v: torch.cummax(v, dim).values,
    )
    return lambda own: of(own.v)
