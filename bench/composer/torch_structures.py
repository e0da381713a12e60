"""Weights with a structure, in PyTorch: low-rank, orthogonal, circulant, masked, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.composer.torch_maker import TorchMaker, torch_transform
from bench.composer.torch_weights import TensorGet
from bench.composer.weights import matrix, square


@torch_transform(matrix)
def low_rank(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A product of two thin matrices."""
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
    """A symmetric or antisymmetric matrix."""
    own.a, how = m.param(*shape), m.choose("plus", "minus", "triu")

    def get(own: Any) -> Tensor:
        if how == "triu":
            return own.a.triu() + own.a.triu(1).mT
        return own.a + own.a.T if how == "plus" else own.a - own.a.T

    return get


@torch_transform(square)
def orthogonal(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """An orthogonal matrix, by Cayley, exponential, reflection or QR."""
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
    """A product of a matrix with itself, and its root."""
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
    """One triangle of a matrix."""
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
    """A matrix that is stored transposed."""
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
    """A weight masked by a buffer, as in pruning."""
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
    """Fake quantization, straight through: by detach, or by PyTorch's own op."""
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
    """A real matrix from a complex parameter."""
    own.a = nn.Parameter(torch.complex(m.normal(*shape), m.normal(*shape)))
    return lambda own: own.a.real * own.a.abs() - own.a.imag


@torch_transform()
def single_precision(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """A weight that is partly computed in float32."""
    own.a, cast = m.param(*shape), m.choose(lambda t: t.float(), lambda t: t.to(torch.float32))
    m.epsilon = max(m.epsilon, 2.0**-23)
    return lambda own: cast(own.a).sin().double()


@torch_transform()
def gathered_rows(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """Rows of a table by fixed indices."""
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
    """A weight concatenated from pieces, repeated, rolled, flipped or padded."""
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
    """A weight that a small network generates from a code, as in hypernetworks."""
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
    """A mixture of several weights by a softmax, as a ParameterList or as one stacked parameter."""
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
    """A weight given by its Fourier transform."""
    n = shape[-1]
    own.a, own.b = m.param(*shape[:-1], n // 2 + 1), m.param(*shape[:-1], n // 2 + 1)
    return lambda own: torch.fft.irfft(torch.complex(own.a, own.b), n=n) * 3


@torch_transform()
def with_frozen_part(m: TorchMaker, own: Any, shape: Sequence[int]) -> TensorGet:
    """The sum of a frozen parameter, a buffer and a trained one; another parameter is unused."""
    own.a, own.frozen, own.unused = m.param(*shape), m.param(*shape), m.param(3)
    own.frozen.requires_grad_(False)
    own.register_buffer("held", m.normal(*shape), persistent=False)
    return lambda own: own.a * own.frozen + 0.3 * own.held
