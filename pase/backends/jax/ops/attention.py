"""Runs a plan's attention: each device computes its part with the requested kernel, under ``shard_map``.

XLA cannot split a kernel, so this module implements the plan's split itself. Parts of the batch and of the heads are
separate attentions. Parts of the queries see all keys; a causal part skips the keys after it. The gradients of keys and
values are summed over the parts that read them. If queries and keys are split in the same way, the parts form a ring
(``pase.local.ring``). If a device lacks the kernel, it computes attention from its definition instead, split in the
same way, and a warning says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.ops.attention_kernels import CuDNN, Flash, Reference
from pase.backends.jax.ops.jaxprs import KEPT
from pase.backends.jax.ops.platforms import platform_of
from pase.frontends.jax.attention import AttentionCall
from pase.frontends.jax.types import Aval
from pase.ir import SourceLine
from pase.local.ring import Attended, AttentionFunctions, RingAttention, merged
from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout, Digit, contiguous_axes

if TYPE_CHECKING:
    import numpy as np
    from jax import Array
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import PartitionSpec

__all__ = ["AttentionSplit", "kernel_for", "of_plan", "on_a_device"]

AxisNames = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionSplit:
    """The mesh axes that split each dim of an attention, major to minor.

    ring: axes that split queries and keys in the same way. Either a ring or a split of the queries alone is used.
    """

    batch: AxisNames = ()
    queries: AxisNames = ()
    ring: AxisNames = ()
    heads: AxisNames = ()
    groups: AxisNames = ()

    @property
    def of_queries(self) -> PartitionSpec:
        """PartitionSpec of queries and results, [b, q, kv heads, group, d], and of sums, [b, q, kv heads, group]."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(self.batch, self.ring or self.queries, self.heads, self.groups)

    @property
    def of_keys(self) -> PartitionSpec:
        """PartitionSpec of keys and values, [b, s, kv heads, d]."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(self.batch, self.ring, self.heads)


def split_of(
    q: AxisLayout,
    k: AxisLayout,
    call: AttentionCall,
    shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int],
) -> AttentionSplit | None:
    """The split that the layouts of queries and keys express; None if it has another form, or a part is not contiguous.

    q, k: the layouts. shapes: of queries and keys. sizes: axis -> its size, in the order of the mesh.
    """
    batch, position, head, _ = call.order
    kv_heads = shapes[1][head]
    found: dict[str, list[tuple[int, int]]] = {f.name: [] for f in fields(AttentionSplit)}
    for axis, (of_q, of_k) in enumerate(zip(q, k, strict=True)):
        if of_q is None and of_k is None:
            continue
        if not isinstance(of_q, Digit) or of_q.dim not in (batch, position, head):
            return None
        name = {batch: "batch", position: "ring" if of_k else "queries", head: "heads" if of_k else "groups"}[
            of_q.dim
        ]
        blocks = of_q.blocks // kv_heads if name == "groups" else of_q.blocks
        found[name].append((blocks, axis))
    names, out = tuple(sizes), {}
    for name, digits in found.items():
        axes = contiguous_axes(digits, tuple(sizes.values()))
        if axes is None:
            return None
        out[name] = tuple(names[a] for a in axes)
    return AttentionSplit(**out)


def kernel_for(
    call: AttentionCall, platform: str, dtype: np.dtype, source: SourceLine
) -> AttentionFunctions[Array]:
    """The kernel that the call requests; the definition, with a warning, if the platform lacks this kernel.

    A call that requests the device's kernel has none in dtypes of more than 16 bits, and runs by its definition.
    """
    if platform == "gpu" and (call.asked == "cudnn" or (call.asked == "fused" and dtype.itemsize == 2)):
        return CuDNN()
    if call.asked == "flash" and platform == "tpu":
        assert call.blocks is not None  # the call names them
        return Flash(blocks=call.blocks)
    if call.asked != "fused":
        _said(call, f"which {platform} devices lack", source)
    return Reference()


def _said(call: AttentionCall, why: str, source: SourceLine) -> None:
    whose = {
        "cudnn": "cuDNN's kernel",
        "flash": "Pallas' kernel for TPUs",
        "fused": "the device's own kernel",
    }[call.asked]
    warnings.warn(
        f"the attention at {source or 'an unknown line'} asks for {whose}, {why}: it runs as two matmuls and a softmax "
        "that store the scores in memory, which costs more than the kernel that the plan priced",
        stacklevel=3,
    )


def of_plan(
    call: AttentionCall,
    reads: Sequence[str | None],
    avals: Sequence[Aval],
    layouts: EquationLayouts | None,
    axes: Mesh,
    mesh: JaxMesh,
    source: SourceLine,
) -> Callable[..., Array] | None:
    """The attention as a function of q, k, v, split as in the plan.

    None to let XLA split its definition, with a warning, if it has a bias or a mask, or parts that are not contiguous.
    reads, avals: the names and avals of its operands. axes: the plan's mesh, which the layouts refer to. mesh: JAX's
    mesh; it may have more axes, such as that of stages. source: the user's line.
    """
    split = _split(call, reads, [a.shape for a in avals], layouts, axes, mesh)
    if split is None:
        _said(call, "which cannot run with a bias or a mask, or on this split of its operands", source)
        return None
    kernel = kernel_for(call, platform_of(mesh), avals[0].dtype, source)
    run = _DeviceShare(
        kernel=kernel, split=split, arrays=JaxArrays(axes), causal=call.causal, scale=call.scale, mesh=mesh
    ).differentiable()
    return _ordered(call, run)


def on_a_device(
    call: AttentionCall,
    operands: Sequence[tuple[tuple[int, ...], AxisLayout]],
    axes: Mesh,
    mesh: JaxMesh,
    source: SourceLine,
    dtype: np.dtype,
) -> Callable[..., Array] | None:
    """The attention as a function of one device's parts, inside of a ``shard_map``; None if its split is not supported.

    The gradients of keys and values are partial sums: each part of the queries and groups that reads them contributes a
    summand. operands: the shapes and layouts of all operands. axes: those of the layouts. mesh: has them, and perhaps
    others. source: the user's line.
    """
    (q, of_q), (k, of_k), *_ = operands
    split = split_of(of_q, of_k, call, (q, k), axes.by_name)
    if split is None or (call.causal and split.queries and q[call.order[1]] != k[call.order[1]]):
        return None
    biased = len(operands) > 3  # with a bias or a mask
    if biased and (split.ring or (call.causal and split.queries)):
        return None
    kernel = kernel_for(call, platform_of(mesh), dtype, source)
    if biased:
        return _with_bias(call, isinstance(kernel, CuDNN))
    local = _DeviceShare(
        kernel=kernel, split=split, arrays=JaxArrays(axes), causal=call.causal, scale=call.scale, mesh=mesh
    )
    return _ordered(call, local.on_a_device())


def _with_bias(call: AttentionCall, by_cudnn: bool) -> Callable[..., Array]:
    """The attention as a function of queries, keys, values, and a bias or a mask or both, as JAX has it."""
    import jax

    def attention(q: Array, k: Array, v: Array, *beside: Array) -> Array:
        masks = [x for x in beside if x.dtype == bool]
        bias = next((x for x in beside if x.dtype != bool), None)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=bias,
            mask=masks[0] if masks else None,
            is_causal=call.causal,
            scale=call.scale,
            implementation="cudnn" if by_cudnn else "xla",
        )

    return attention


def _ordered(call: AttentionCall, run: Callable[..., Array]) -> Callable[..., Array]:
    """The function of arrays in the call's dim order that applies ``run``, which takes [b, q, kv heads, group, d] and
    [b, s, kv heads, d].
    """
    order = tuple(
        sorted(range(4), key=lambda i: call.order[i])
    )  # the inverse permutation, from (b, q, h, d) to the call's order

    def attention(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.transpose(call.order) for x in (q, k, v))
        b, t, _, d = q.shape
        kv_heads = k.shape[2]
        out = run(q.reshape(b, t, kv_heads, -1, d), k, v)
        return out.reshape(b, t, -1, v.shape[-1]).transpose(order)

    return attention


def _split(
    call: AttentionCall,
    reads: Sequence[str | None],
    shapes: Sequence[tuple[int, ...]],
    layouts: EquationLayouts | None,
    axes: Mesh,
    mesh: JaxMesh,
) -> AttentionSplit | None:
    """The plan's split; None if it is not supported, with a bias or a mask, or if one tensor is read twice."""
    if layouts is None or len(reads) != 3 or reads[0] in (None, *reads[1:]):
        return None
    q, k = (layouts.reads.get(name or "") for name in reads[:2])
    if q is None or k is None:
        return None
    split = split_of(q, k, call, shapes, axes.by_name)
    unequal = shapes[0][call.order[1]] != shapes[1][call.order[1]]
    if split is None or (call.causal and split.queries and unequal):
        return None
    outside = set(
        mesh.manual_axes
    )  # axes of a surrounding region, along which devices already have their parts
    left = ((f.name, tuple(a for a in getattr(split, f.name) if a not in outside)) for f in fields(split))
    return AttentionSplit(**dict(left))


@dataclass(frozen=True, kw_only=True)
class _DeviceShare:
    """The computation of one device: its part of the attention, forward and backward."""

    kernel: AttentionFunctions[Array]
    split: AttentionSplit
    arrays: JaxArrays
    causal: bool
    scale: float
    mesh: JaxMesh

    def differentiable(self) -> Callable[..., Array]:
        """f(q, k, v) on whole arrays, with its own derivative rule: kernels have none for a split attention."""
        import jax
        from jax.ad_checkpoint import checkpoint_name

        of_q, of_k = self.split.of_queries, self.split.of_keys

        def mapped(fn: Callable[..., Tree], ins: Sequence[PartitionSpec], outs: Tree) -> Callable[..., Tree]:
            axes = set(self.mesh.axis_names) - set(self.mesh.manual_axes)
            return jax.shard_map(
                fn, mesh=self.mesh, in_specs=ins, out_specs=outs, axis_names=axes, check_vma=False
            )

        left = (of_q, of_k, of_k, of_q)  # the residuals: queries, keys, values and the logarithms of the sums
        forward = mapped(self._forward, left[:3], (of_q, left))
        backward = mapped(self._backward, (*left, of_q, of_q), left[:3])

        @jax.custom_vjp
        def attention(q: Array, k: Array, v: Array) -> Array:
            return forward(q, k, v)[0]

        def kept(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
            # Both are named, so that a policy that saves the result does not run the kernel again for its sums.
            result, (q, k, v, sums) = forward(q, k, v)
            result, sums = checkpoint_name(result, KEPT), checkpoint_name(sums, KEPT)
            return result, (q, k, v, sums, result)

        attention.defvjp(kept, lambda given, gradient: backward(*given, gradient))
        return attention

    def on_a_device(self) -> Callable[..., Array]:
        """f(q, k, v) on this device's parts. Its gradients of keys and values are partial sums."""
        import jax

        @jax.custom_vjp
        def attention(q: Array, k: Array, v: Array) -> Array:
            return self._forward(q, k, v)[0]

        def kept(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
            result, left = self._forward(q, k, v)
            return result, (*left, result)

        def pulled(given: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
            q, k, v, sums, result = given
            return self._summands(q, k, v, sums, result, gradient)

        attention.defvjp(kept, pulled)
        return attention

    def _parts(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.split.queries) if self.causal else 1

    def _ring(self) -> RingAttention[Array] | None:
        if not self.split.ring:
            return None
        return RingAttention(
            arrays=self.arrays,
            kernel=self.kernel,
            axes=self.split.ring,
            causal=self.causal,
            scale=self.scale,
            positions=1,
        )

    def _forward(self, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
        """(result, residuals for backward)"""
        import jax

        if (ring := self._ring()) is not None:
            return ring.forward(q, k, v)

        def part(i: int) -> Callable[[], tuple[Array, Array]]:
            return lambda: self._part_forward(i, q, k, v)

        if self._parts() == 1:
            result, sums = self.kernel.forward(q, k, v, causal=self.causal, scale=self.scale)
        else:
            here = jax.lax.axis_index(self.split.queries)
            result, sums = jax.lax.switch(here, [part(i) for i in range(self._parts())])
        return result, (q, k, v, sums)

    def _part_forward(self, i: int, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """(result, sums) of the i-th part of the queries, which sees all keys before it, and its own under the mask."""
        own = slice(i * q.shape[1], (i + 1) * q.shape[1])
        done = self.kernel.forward(q, k[:, own], v[:, own], causal=True, scale=self.scale)
        if i == 0:
            return done
        before = slice(0, own.start)
        seen = self.kernel.forward(q, k[:, before], v[:, before], causal=False, scale=self.scale)
        return merged(done, seen, self.arrays)

    def _backward(
        self, q: Array, k: Array, v: Array, sums: Array, result: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """The gradients of q, k and v, summed over the parts that read keys and values."""
        import jax

        dq, dk, dv = self._summands(q, k, v, sums, result, gradient)
        over = (*self.split.queries, *self.split.groups)
        return (dq, jax.lax.psum(dk, over), jax.lax.psum(dv, over)) if over else (dq, dk, dv)

    def _summands(
        self, q: Array, k: Array, v: Array, sums: Array, result: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        import jax

        if (ring := self._ring()) is not None:
            dq, *of_keys = ring.backward(q, k, v, sums, result, gradient)
        elif self._parts() == 1:
            done = Attended(q, k, v, result, sums)
            dq, *of_keys = self.kernel.backward(done, gradient, causal=self.causal, scale=self.scale)
        else:

            def part(i: int) -> Callable[[], tuple[Array, Array, Array]]:
                return lambda: self._part_backward(i, q, k, v, result, sums, gradient)

            dq, *of_keys = jax.lax.switch(
                jax.lax.axis_index(self.split.queries), [part(i) for i in range(self._parts())]
            )
        dk, dv = of_keys
        return dq, dk, dv

    def _part_backward(
        self, i: int, q: Array, k: Array, v: Array, result: Array, sums: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        import jax.numpy as jnp

        own = slice(i * q.shape[1], (i + 1) * q.shape[1])
        done = Attended(q, k[:, own], v[:, own], result, sums)
        dq, dk, dv = self.kernel.backward(done, gradient, causal=True, scale=self.scale)
        if i:
            before = slice(0, own.start)
            done = Attended(q, k[:, before], v[:, before], result, sums)
            more, *first = self.kernel.backward(done, gradient, causal=False, scale=self.scale)
            dq = dq + more
            dk, dv = (jnp.concatenate(pair, axis=1) for pair in zip(first, (dk, dv), strict=True))
        after = ((0, 0), (0, k.shape[1] - own.stop), (0, 0), (0, 0))
        return dq, jnp.pad(dk, after), jnp.pad(dv, after)
