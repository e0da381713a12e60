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
from bench.composer.weights import matrix, square

TensorGet = Callable[[Any], Tensor]
"""f(the module that holds the parameters) -> a weight."""


class RoundedThrough(torch.autograd.Function):
    """Rounded to quarters; its gradient passes straight through where the weight is small."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return (w * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return g * (w.abs() < 1.5)


class SwishOwnBackward(torch.autograd.Function):
    """x * sigmoid(x), which keeps x alone."""

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
    own.a, own.s = m.param(*shape), m.param(scale=0.3)
    return lambda own: own.a * own.s.exp()


@torch_transform()
def weight_norm(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.v, own.g = m.param(*shape), m.param(shape[-1], scale=0.3, shift=1)
    dims = tuple(range(len(shape) - 1))

    def get(own: Any) -> Tensor:
        squares = own.v**2
        return own.g * own.v * torch.rsqrt((squares.sum(dims, keepdim=True) if dims else squares) + 1e-2)

    return get


@torch_transform()
def normalised(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
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
    own.v = m.param(*shape)
    return lambda own: own.v - own.v.mean(-1, keepdim=True)


@torch_transform()
def softmax(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.v, dim, of = m.param(*shape), m.choose(0, -1), m.choose(F.softmax, F.log_softmax, F.softmin)
    return lambda own: of(own.v, dim=dim) * 2


@torch_transform()
def cumulative(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.v, dim = m.param(*shape, scale=0.4), m.choose(0, -1)
    of = m.choose(
        lambda v: v.cumsum(dim),
        lambda v: torch.logcumsumexp(v, dim) * 0.5,
        lambda v: torch.cumprod(1 + 0.1 * v, dim),
        lambda v: torch.cummax(v, dim).values,
    )
    return lambda own: of(own.v)


@torch_transform(matrix)
def low_rank(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    *outer, inner = shape
    own.a, own.b = m.param(*outer, 4, scale=0.7), m.param(4, inner, scale=0.7)
    return lambda own: own.a @ own.b


@torch_transform(matrix)
def adapted(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """LoRA: a frozen weight and a low-rank change."""
    *outer, inner = shape
    own.w, own.a, own.b = m.param(*shape), m.param(*outer, 2), m.param(2, inner, scale=0.3)
    own.w.requires_grad_(False)
    return lambda own: own.w + 2.0 * (own.a @ own.b)


@torch_transform(square)
def symmetric(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a, how = m.param(*shape), m.choose("plus", "minus", "triu")

    def get(own: Any) -> Tensor:
        if how == "triu":
            return own.a.triu() + own.a.triu(1).mT
        return own.a + own.a.T if how == "plus" else own.a - own.a.T

    return get


@torch_transform(square)
def orthogonal(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a, how = m.param(*shape, scale=0.3), m.choose("solve", "exp", "inv", "householder", "qr")
    own.register_buffer("eye", torch.eye(shape[0]))

    def get(own: Any) -> Tensor:
        if how == "householder":
            v = own.a[0]
            return 2 * (own.eye - 2 * torch.outer(v, v) / v.square().sum())
        if how == "qr":
            return torch.linalg.qr(own.a + 2 * own.eye).Q * 2
        skew = own.a - own.a.T
        if how == "exp":
            return torch.linalg.matrix_exp(skew)
        if how == "inv":
            return torch.linalg.inv(own.eye + skew) * 2
        return torch.linalg.solve(own.eye + skew, own.eye - skew) * 2

    return get


@torch_transform(square)
def gram(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a, how = m.param(*shape, scale=0.5), m.choose("matmul", "einsum", "power", "cholesky")

    def get(own: Any) -> Tensor:
        if how == "einsum":
            return torch.einsum("ik,jk->ij", own.a, own.a) * 0.3
        if how == "power":
            return torch.linalg.matrix_power(own.a, 2) * 0.5
        found = own.a @ own.a.T
        return (
            torch.linalg.cholesky(found + torch.eye(len(found), dtype=found.dtype))
            if how == "cholesky"
            else found
        )

    return get


@torch_transform(square)
def circulant(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Each row is the row before, rolled by one; or a Toeplitz matrix: by an index, a stack of rolls, or an unfold."""
    n, how = shape[0], m.choose("index", "roll", "toeplitz", "unfold", "gather")
    own.a = m.param(2 * n - 1 if how in ("toeplitz", "unfold") else n)
    at = torch.arange(n)
    own.register_buffer(
        "at", (at[None] - at[:, None]) % n if how != "toeplitz" else at[None] - at[:, None] + n - 1
    )

    def get(own: Any) -> Tensor:
        if how == "roll":
            return torch.stack([own.a.roll(i) for i in range(n)])
        if how == "unfold":
            return own.a.unfold(0, n, 1)
        if how == "gather":
            return own.a.expand(n, n).gather(1, own.at)
        return own.a[own.at]

    return get


@torch_transform(square)
def triangular(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a, of = m.param(*shape), m.choose(torch.tril, torch.triu)
    return lambda own: of(own.a)


@torch_transform(square)
def triangle_of_entries(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Entries of a triangle, put into a matrix by their indices."""
    n = shape[0]
    own.a = m.param(n * (n + 1) // 2)
    at = torch.tril_indices(n, n)

    def get(own: Any) -> Tensor:
        zero = torch.zeros(n, n, dtype=own.a.dtype)
        return zero.index_put((at[0], at[1]), own.a)

    return get


@torch_transform(matrix)
def transposed(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a, n = m.param(*shape[::-1]), len(shape)
    return lambda own: own.a.permute(*range(n)[::-1]).contiguous()


@torch_transform(matrix)
def reshaped(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A parameter of another shape, of which the weight is a view."""
    *outer, inner = shape
    flat, how = m.chance(0.5), m.choose("view", "unflatten", "split")
    own.a = m.param(int(torch.Size(shape).numel())) if flat else m.param(inner, *outer)

    def get(own: Any) -> Tensor:
        if flat and how == "unflatten":
            return own.a.unflatten(0, tuple(shape))
        if how == "split":
            halves = own.a.reshape(-1).split(own.a.numel() // 2)
            return torch.cat([halves[0].sin(), *halves[1:]]).view(*shape)
        return own.a.t().reshape(shape) if own.a.dim() == 2 else own.a.reshape(shape)

    return get


@torch_transform()
def masked(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """By a buffer, as pruning does it."""
    own.a, how = m.param(*shape), m.choose("times", "fill", "where")
    own.register_buffer("mask", m.normal(*shape) > -0.3)

    def get(own: Any) -> Tensor:
        if how == "times":
            return own.a * own.mask
        return (
            own.a.masked_fill(~own.mask, 0.1)
            if how == "fill"
            else torch.where(own.mask, own.a, own.a.detach() / 2)
        )

    return get


@torch_transform()
def fake_quantised(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Straight through: by detach, or by PyTorch's own op."""
    own.a, how = m.param(*shape), m.choose("rows", "mean", "op")

    def get(own: Any) -> Tensor:
        w = own.a
        if how == "op":
            return torch.fake_quantize_per_tensor_affine(w.float(), 0.05, 0, -128, 127).double()
        if how == "rows":
            step = w.abs().amax(0, keepdim=True).detach() / 7
            return w + ((w / step).round().clamp(-7, 7) * step - w).detach()
        scale = w.abs().mean() + 1e-5
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()

    if how == "op":
        m.epsilon = max(m.epsilon, 2.0**-23)
    return get


@torch_transform()
def polar(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """The real part of a complex number."""
    own.a, own.b = m.param(*shape, scale=0.3), m.param(*shape)
    how = m.choose("exp", "polar", "complex", "view")

    def get(own: Any) -> Tensor:
        if how == "exp":
            return torch.exp(-own.a.exp() + 1j * own.b).real * 2
        if how == "polar":
            return torch.polar(own.a.exp(), own.b).imag
        if how == "complex":
            z = torch.complex(own.a, own.b)
            return (z * z).real + z.abs()
        z = torch.view_as_complex(torch.stack([own.a, own.b], -1))
        return torch.view_as_real(z * z.conj() + z).sum(-1)

    return get


@torch_transform()
def complex_parameter(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    own.a = nn.Parameter(torch.complex(m.normal(*shape), m.normal(*shape)))
    return lambda own: own.a.real * own.a.abs() - own.a.imag


@torch_transform()
def single_precision(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Computed as float32 in part."""
    own.a, cast = m.param(*shape), m.choose(lambda t: t.float(), lambda t: t.to(torch.float32))
    m.epsilon = max(m.epsilon, 2.0**-23)
    return lambda own: cast(own.a).sin().double()


@torch_transform()
def gathered_rows(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Rows of a table by fixed numbers."""
    own.table, how = m.param(shape[0] + 2, *shape[1:]), m.choose("index", "select", "take", "embedding")
    own.register_buffer("at", m.integers(shape[0] + 2, shape[0]))

    def get(own: Any) -> Tensor:
        if how == "select":
            return own.table.index_select(0, own.at)
        if how == "take":
            return torch.take_along_dim(own.table, own.at.view(-1, *[1] * (own.table.dim() - 1)), 0).expand(
                *shape
            )
        return (
            F.embedding(own.at, own.table)
            if how == "embedding" and own.table.dim() == 2
            else own.table[own.at]
        )

    return get


@torch_transform()
def of_pieces(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Joined from pieces, repeated, rolled, flipped or padded."""
    n, how = (
        shape[0],
        m.choose("cat", "repeat", "roll", "flip", "pad", "stack", "narrow", "interleave", "outer"),
    )
    k = n // 2 if how in ("repeat", "interleave", "cat", "stack") and n % 2 == 0 else n
    own.a, own.b = m.param(*((k, *shape[1:]))), m.param(*((n - k or k), *shape[1:]))

    def get(own: Any) -> Tensor:
        a, b = own.a, own.b
        if k < n:
            if how == "repeat":
                return a.repeat(2, *[1] * (a.dim() - 1)) * b.mean()
            if how == "interleave":
                return a.repeat_interleave(2, 0) + b.mean()
            return torch.cat([a, b.sin()]) if how == "cat" else torch.stack([a, b]).flatten(0, 1)
        if how == "roll":
            return a.roll(1, 0) * b
        if how == "flip":
            return a.flip(0) + b
        if how == "narrow":
            return F.pad(a.narrow(0, 1, n - 1), [0, 0] * (a.dim() - 1) + [1, 0]) + b
        if how == "outer" and a.dim() == 2:
            return torch.outer(a[:, 0], b[0])
        return a * b.mean(0, keepdim=True)

    return get


@torch_transform(matrix)
def generated(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """By a small network from a code, as hypernetworks do it."""
    own.code, own.make = m.param(6), nn.Linear(6, int(torch.Size(shape).numel()))
    return lambda own: own.make(own.code.tanh()).view(*shape) * 1.5


@torch_transform(matrix)
def kronecker(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Products of two small matrices."""
    *outer, i, o = shape
    rows, columns = (2 if n % 2 == 0 else 1 for n in (i, o))
    own.a, own.b = m.param(rows, columns), m.param(*outer, i // rows, o // columns)
    how = m.choose("kron", "einsum")

    def get(own: Any) -> Tensor:
        if how == "kron" and not outer:
            return torch.kron(own.a, own.b)
        return torch.einsum("ab,...cd->...acbd", own.a, own.b).reshape(shape)

    return get


@torch_transform()
def averaged(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A mixture of several, by a softmax; as a ParameterList, or as one stacked parameter."""
    own.mix, listed = m.param(3), m.chance(0.5)
    if listed:
        own.all = nn.ParameterList([m.param(*shape) for _ in range(3)])
    else:
        own.all = m.param(3, *shape)

    def get(own: Any) -> Tensor:
        share = own.mix.softmax(0)
        if listed:
            return sum(s * w for s, w in zip(share, own.all, strict=True)) * 1.5  # type: ignore[no-any-return]
        return torch.tensordot(share, own.all, 1) * 1.5

    return get


@torch_transform()
def spectral(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Given by its Fourier transform."""
    n = shape[-1]
    own.a, own.b = m.param(*shape[:-1], n // 2 + 1), m.param(*shape[:-1], n // 2 + 1)
    return lambda own: torch.fft.irfft(torch.complex(own.a, own.b), n=n) * 3


@torch_transform()
def with_frozen_part(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A sum of a frozen parameter, a buffer and a trained one; another parameter is not used at all."""
    own.a, own.frozen, own.unused = m.param(*shape), m.param(*shape), m.param(3)
    own.frozen.requires_grad_(False)
    own.register_buffer("held", m.normal(*shape), persistent=False)
    return lambda own: own.a * own.frozen + 0.3 * own.held
