"""What PyTorch does with dtypes when it runs a step, and the exported step does not say.

It refuses some calls: a step is exported on tensors without data, and of many ops PyTorch then checks shapes only. Such
a step would get a plan and a price, but could never run. And it rounds products of float32, or does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments, op_name
from pase.ir.types import FactorPrecision, OpKind

if TYPE_CHECKING:
    import torch

__all__ = ["check_dtypes", "precision_of_products"]

_ALIKE = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "addmv",
        "mv",
        "dot",
        "vdot",
        "inner",
        "tensordot",
        "bilinear",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "_grouped_mm",
        "index_put",
        "index_put_",
        "index_add",
        "index_copy",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "masked_scatter",
        "embedding_bag",
        "cdist",
        "_cdist_forward",
        "grid_sampler",
        "grid_sampler_2d",
        "grid_sampler_3d",
    }
)
"""Ops that convert none of their operands: all but places and masks must have one dtype."""
_NORMS = frozenset(
    {
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "native_group_norm",
        "instance_norm",
        "batch_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
    }
)
"""Norms: their parameters have the dtype of what they normalize, or float32 if that is narrower."""
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_SOFT = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax"})
_PLACES = frozenset({"index", "indices", "offsets", "offs", "mask"})


def check_dtypes(n: FxNode, where: str) -> None:
    """Raise PaseError if PyTorch does not run this call for its operands' dtypes. where: names the call for the
    message."""
    name = op_name(n)
    if name in _ALIKE:
        given = [x for x in _given(n) if x[0] not in _PLACES]
        if len({dtype for _, dtype in given}) > 1 and "out_dtype" not in n.kwargs:
            raise _mixed(given, "all of one dtype", where)
    elif name in _NORMS:
        (_, x), *rest = _given(n)
        if any(dtype != x and not (x.itemsize < 4 and dtype.itemsize == 4) for _, dtype in rest):
            raise _mixed(
                _given(n), "parameters of its input's dtype, or of float32 for a narrower input", where
            )
    elif name in _LOSSES:
        _check_loss(dict(_given(n)), where)
    elif name in _SOFT and not _result(n).is_floating_point:
        raise PaseError(
            f"it is called with {_short(_result(n))}, and PyTorch computes it of floating-point numbers only",
            where=where,
            fix="convert its operand first (x.float())",
        )


def precision_of_products() -> dict[OpKind, FactorPrecision]:
    """The precision of float32 products, by kind, that PyTorch is set to now.

    Unless they may round their factors to TF32, they keep all bits. Fused attention always does: its kernel for float32
    (CUTLASS' OpMultiplyAddFastF32 in aten/src/ATen/native/transformers/cuda/mem_eff_attention) sums three products of
    TF32, whatever PyTorch is set to.
    """
    import torch

    rounds: dict[OpKind, bool] = {
        "matmul": torch.backends.cuda.matmul.allow_tf32,
        "conv": torch.backends.cudnn.allow_tf32,
    }
    return {"attention": "highest", **{kind: "highest" for kind, allowed in rounds.items() if not allowed}}


def _check_loss(given: dict[str, torch.dtype], where: str) -> None:
    labels = given["target"]
    if not (labels.is_floating_point or str(labels) in ("torch.int64", "torch.uint8")):
        raise PaseError(
            f"its labels are {_short(labels)}, and PyTorch takes int64",
            where=where,
            fix="convert them (labels.long())",
        )
    if given.get("weight", given["self"]) != given["self"]:
        raise _mixed([(k, given[k]) for k in ("self", "weight")], "weights of its scores' dtype", where)


def _given(n: FxNode) -> list[tuple[str, torch.dtype]]:
    """Argument and dtype of the tensors that a call passes, in the schema's order."""
    import torch

    found = []
    for k, v in arguments(n.target, n.args, n.kwargs).items():
        for m in v if isinstance(v, (list, tuple)) else (v,):
            value = m.meta.get("val") if isinstance(m, torch.fx.Node) else None
            if isinstance(value, torch.Tensor):
                found.append((k, value.dtype))
    return found


def _result(n: FxNode) -> torch.dtype:
    return n.meta["val"].dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mixed(given: list[tuple[str, torch.dtype]], wanted: str, where: str) -> PaseError:
    found = ", ".join(f"'{k}' is {_short(dtype)}" for k, dtype in given)
    return PaseError(
        f"its operands differ in dtype ({found}), and PyTorch runs it only with {wanted}",
        where=where,
        fix="convert one of them, build the whole model in one dtype (module.to(dtype), with inputs of that dtype), or "
        "use torch.autocast inside of the step",
    )
