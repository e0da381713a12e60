"""Rules for primitives beyond plain array code: collectives over a named axis, callbacks, kernels, sparse matrices, and
the primitives of Equinox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from pase.errors import PaseError
from pase.frontends.jax.rules import RULES, _count, _dtype, _kept, _opaque, _operand, _shape, _tensors, lowers
from pase.frontends.jax.types import Eqn
from pase.frontends.registry import UnknownOp
from pase.ir import Size, Tensor, functions
from pase.ir.functions import FUNCTIONS
from pase.ops import GraphBuilder, indexed, nests
from pase.registry import Registry

__all__ = ["KERNELS", "RULES", "KernelRule", "register_kernel"]

KernelRule = Callable[
    [GraphBuilder, Sequence[Tensor], Sequence[tuple[tuple[Size, ...], str]]], Sequence[Tensor]
]
"""Takes a kernel's operands and the (shape, dtype) of each result, adds its loop nest, and returns its results."""

KERNELS: Registry[KernelRule] = Registry("Pallas kernel")


def register_kernel(name: str, nest: KernelRule | float) -> None:
    """Sets the cost of the Pallas kernels with this name.

    nest: the FLOPs of a whole call, or a function that adds its loop nest.

    A kernel runs whole on every device, as XLA runs it; ``jax.shard_map`` around it splits it. Raises ValueError if the
    name already has a cost.
    """
    if not callable(nest):
        flops = float(nest)
        if not flops > 0:
            raise PaseError(
                f"it has {flops} FLOPs, but a cost must be positive",
                where=f"kernel '{name}'",
                fix="pass a positive number of FLOPs",
            )

        def whole(
            b: GraphBuilder, inputs: Sequence[Tensor], outs: Sequence[tuple[tuple[Size, ...], str]]
        ) -> Sequence[Tensor]:
            return nests.opaque(b, name, inputs, outs, flops=flops)

        nest = whole
    KERNELS.add(name, nest)


_REDUCED = {"psum": "reduce_sum", "psum_invariant": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


@lowers(*_REDUCED)
def _reduce_axis(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A reduction over axes. Under ``vmap(axis_name=…)`` the axes are numbers and are reduced; inside ``shard_map``
    they are names, and nothing is reduced within a device."""
    axes = eqn.params["axes"]
    function = FUNCTIONS[_REDUCED[eqn.primitive.name]]
    by_number = [a for a in axes if isinstance(a, int)]
    out: list[Tensor] = []
    for i, v in enumerate(eqn.outvars):
        x = _operand(b, eqn, ins, i)
        if by_number:
            with nullcontext() if function.linear else b.without_gradient():
                out += nests.reduce(b, function, [x], by_number, [_dtype(v)])
        else:
            out += nests.elementwise(  # over an axis of a mesh or of vmap, which the graph does not have
                b,
                function,
                [x, None],
                [_dtype(v)],
                name=eqn.primitive.name,
                shape=x.shape,
                differentiable=function.linear,
            )
    return out


@lowers("all_gather", "all_gather_invariant", "reduce_scatter", "ppermute", "all_to_all", "axis_index")
def _by_name(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A collective inside ``shard_map``, whose body is priced by its FLOPs."""
    return _opaque(b, eqn, ins)


@lowers("pure_callback", "io_callback")
def _callback(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A callback. The host gets whole arrays. Their traffic is priced, but the host's own work is not known."""
    b.remark(
        "unknown",
        f"for the {eqn.primitive.name} at {b.line}, only the traffic is priced, not what the host computes",
    )
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    return nests.opaque(b, eqn.primitive.name, _tensors(ins), outs, differentiable=False)


@lowers("pallas_call")
def _pallas(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A Pallas kernel. Its cost comes from ``register_kernel``, or else from the kernel's own cost estimate."""
    info = eqn.params.get("name_and_src_info")
    name = str(getattr(info, "name", None) or eqn.params.get("name") or "pallas_call")
    inputs = [_operand(b, eqn, ins, i) for i in range(len(ins))]
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    if name in KERNELS:
        return KERNELS[name](b, inputs, outs)
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None and estimate.flops > 0:
        return nests.opaque(b, name, inputs, outs, flops=float(estimate.flops))
    raise UnknownOp(
        f"the Pallas kernel '{name}' has no cost",
        where=str(b.source or "an unknown line"),
        fix=f"set it with pase.register_kernel('{name}', FLOPS), or with cost_estimate= in pallas_call; or pass "
        f"unknown='replicate' (the kernel is then not split, and its FLOPs are not priced)",
    )


@lowers("bcoo_dot_general")
def _sparse_product(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A sparse matrix times a dense one: two FLOPs per stored element and column of the dense operand. The columns may
    be split. Rows may not, because the indices that match them with elements are known only at run time."""
    data, indices, dense = (_operand(b, eqn, ins, i) for i in range(3))
    contracting, batch = eqn.params["dimension_numbers"]
    (shape,) = (_shape(v) for v in eqn.outvars)
    free = [i for i in range(len(dense.shape)) if i not in contracting[1] and i not in batch[1]]
    if any(batch) or len(data.shape) != 1:
        points = _count(data.shape) * _count([dense.shape[i] for i in free])
        return _opaque(b, eqn, ins, flops=2.0 * points)
    first = len(shape) - len(free)
    return [
        indexed.columns(
            b, "bcoo_dot_general", [data, indices], dense, free, shape, _dtype(eqn.outvars[0]), first
        )
    ]


@lowers(
    "bcoo_transpose",
    "bcoo_todense",
    "bcoo_fromdense",
    "bcoo_extract",
    "bcoo_reduce_sum",
    "bcoo_broadcast_in_dim",
    "bcoo_multiply_sparse",
    "bcoo_multiply_dense",
    "bcoo_spdot_general",
    "bcoo_sort_indices",
    "bcoo_sum_duplicates",
    "bcoo_concatenate",
    "bcoo_dynamic_slice",
    "bcoo_slice",
    "bcoo_squeeze",
    "bcoo_reshape",
    "bcoo_gather",
    "bcoo_dot_general_sampled",
    "bcoo_rdot_general",
    "bcsr_dot_general",
    "bcsr_todense",
    "bcsr_extract",
    "csr_todense",
    "csr_matvec",
    "csr_matmat",
    "coo_todense",
    "coo_matvec",
    "coo_matmat",
)
def _sparse(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A sparse op: a few operations per element. It is not split."""
    return _opaque(b, eqn, ins, flops=10.0 * max(_count(_shape(v)) for v in (*eqn.invars, *eqn.outvars)))


@lowers("unvmap_any", "unvmap_all", "unvmap_max")
def _of_all_examples(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    outs = [(_shape(v), _dtype(v)) for v in eqn.outvars]
    flops = _count(_shape(eqn.invars[0]))
    return nests.opaque(b, eqn.primitive.name, _tensors(ins), outs, flops=flops, differentiable=False)


@lowers(
    "select_if_vmap",
    "nonbatchable",
    "nondifferentiable",
    "nondifferentiable_backward",
    "nontraceable",
    "announce_jaxpr",
    "branched_error_if",
)
def _passed_on(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Equinox's checks, which return their operands. A choice between two costs one operation per point."""
    if len(eqn.outvars) != 1:
        return _opaque(b, eqn, ins)
    shape = _shape(eqn.outvars[0])
    inputs = [t for t in _tensors(ins) if t.shape in (shape, ())]
    name = eqn.primitive.name
    if name != "select_if_vmap":
        operands: list[Tensor | None] = [*inputs] if len(inputs) == 1 else [*inputs, None]
        return nests.elementwise(
            b, functions.COPY, operands, [_dtype(eqn.outvars[0])], name=name, shape=shape
        )
    return nests.elementwise(
        b, functions.WHERE, [*inputs, None], [_dtype(eqn.outvars[0])], name=name, shape=shape
    )


@lowers("maybe_set")
def _maybe_set(b: GraphBuilder, eqn: Eqn, ins: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Equinox's conditional xs.at[i].set(x). The first dim may not be split."""
    stack, x = _operand(b, eqn, ins, 1), _operand(b, eqn, ins, 2)
    if len(x.shape) + 1 != len(stack.shape):
        return _opaque(b, eqn, ins, flops=_count(stack.shape))
    row = nests.reshape(b, x, (1, *x.shape))
    scalars = [t for t in (ins[0], ins[3]) if t is not None]
    return [
        nests.restrict(
            b, "maybe_set", [stack, row, *scalars], stack.shape, [False, *_kept(stack.shape, row.shape)[1:]]
        )
    ]
