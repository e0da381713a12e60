"""Rules for JAX's linear algebra: products of ragged groups, transforms, factorisations and solves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.jax.rules import _count, _dtype, _opaque, _operand, _shape, _size, lowers
from pase.frontends.jax.types import Eqn
from pase.ir import Tensor, functions
from pase.ir.sizes import product
from pase.ops import GraphBuilder, nests

__all__: list[str] = []


@lowers("ragged_dot_general")
def _ragged_dot(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Consecutive groups of rows of x, each times the weights of its group. Rows and groups are not split, because
    group boundaries are known only at run time. The group sizes, a few integers, are not counted as traffic."""
    d = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, batch) = d.dot_dimension_numbers
    x, w = _operand(b, eqn, ins, 0), _operand(b, eqn, ins, 1)
    plain = len(d.rhs_group_dimensions) == 1 and not any(batch) and len(x.shape) == 2 and len(w.shape) == 3
    if not plain or eqn.params["group_offset"] is not None:
        points = product([*_shape(eqn.outvars[0]), *(x.shape[i] for i in contracting[0])])
        return _opaque(b, eqn, ins, flops=2.0 * float(points))  # type: ignore[arg-type]
    (k,) = contracting[0]
    return [
        nests.grouped_product(
            b, x, w, k, contracting[1][0], d.rhs_group_dimensions[0], _dtype(eqn.outvars[0])
        )
    ]


@lowers("fft")
def _fft(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A Fourier transform. The transformed dims are not split; 5 log2(n) FLOPs per point (Cooley and Tukey's count)."""
    lengths = eqn.params["fft_lengths"]
    points = product(_size(n) for n in lengths)
    flops = 5.0 * math.log2(points) if isinstance(points, int) else 50.0
    x, shape = _operand(b, eqn, ins), _shape(eqn.outvars[0])
    rank = len(x.shape) - len(lengths)
    out = [(shape, _dtype(eqn.outvars[0]))]
    return nests.batched(b, "fft", [x], out, rank, flops=flops * _count(shape[rank:]), function=functions.FFT)


# FLOPs for a matrix with n rows and n columns, as multiples of n**3 (Golub and Van Loan, Matrix Computations).
_MATRIX = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "geqp3": 4 / 3,
    "householder_product": 4 / 3,
    "ormqr": 4 / 3,
    "eigh": 9.0,
    "eig": 25.0,
    "svd": 21.0,
    "schur": 25.0,
    "hessenberg": 10 / 3,
    "tridiagonal": 4 / 3,
    "triangular_solve": 1.0,
    "symmetric_product": 1.0,
    "lu_pivots_to_permutation": 0.0,
    "tridiagonal_solve": 0.0,
    "cholesky_update": 0.0,
}


@lowers(*_MATRIX)
def _matrix(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A factorisation or solve. A batch of matrices may be split, but not a matrix."""
    inputs = [_operand(b, eqn, ins, i) for i in range(len(ins))]
    rank = min(max(len(t.shape) for t in inputs) - 2, *(len(t.shape) for t in inputs))
    rank = max(rank, 0)
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    lead = inputs[0].shape[:rank]
    if any(shape[:rank] != lead for shape in (*(t.shape for t in inputs), *(o for o, _ in outs))):
        rank = 0
    side = max((_count(t.shape[rank:]) for t in inputs), default=1.0) ** 0.5
    return nests.batched(
        b, eqn.primitive.name, inputs, outs, rank, flops=_MATRIX[eqn.primitive.name] * side**3
    )
