"""Rules for PyTorch's linear algebra. A batch of matrices may be split; a matrix is not split."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.values import Value
from pase.frontends.torch.rules import lowers
from pase.frontends.torch.values import TorchCall
from pase.ops import nests

__all__: list[str] = []

_MATRIX = {
    "linalg_cholesky_ex": 1 / 3,
    "cholesky": 1 / 3,
    "cholesky_solve": 2.0,
    "cholesky_inverse": 1.0,
    "linalg_lu_factor_ex": 2 / 3,
    "linalg_lu": 2 / 3,
    "linalg_qr": 4 / 3,
    "linalg_inv_ex": 2.0,
    "_linalg_det": 2 / 3,
    "_linalg_slogdet": 2 / 3,
    "_linalg_solve_ex": 2 / 3,
    "linalg_lu_solve": 2.0,
    "linalg_solve_triangular": 1.0,
    "triangular_solve": 1.0,
    "_linalg_eigh": 9.0,
    "linalg_eig": 25.0,
    "_linalg_svd": 21.0,
    "linalg_pinv": 21.0,
    "linalg_matrix_exp": 20.0,
}
"""FLOPs for an n by n matrix, as multiples of n**3 (Golub and Van Loan, Matrix Computations)."""


@lowers(*_MATRIX)
def _matrix(c: TorchCall) -> Sequence[Value]:
    inputs = [v for v in c.values if v.elements and len(v.shape) > 1]
    outs = [s for s in c.outs if s is not None]
    rank = min(len(v.shape) for v in inputs) - 2
    lead = inputs[0].shape[:rank]
    if any(s[:rank] != lead for s in (*(v.shape for v in inputs), *(s for s, _ in outs))):
        rank = 0  # an operand is broadcast along the batch dims
    side = max(math.prod(v.shape[rank:]) for v in inputs) ** 0.5
    made = nests.batched(
        b=c.b, name=c.op, inputs=c.tensors(*inputs), outs=outs, rank=rank, flops=_MATRIX[c.op] * side**3
    )
    return [c.value(t) for t in made]
