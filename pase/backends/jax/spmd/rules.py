"""The rules that run one equation on one device.

Most primitives do the same on a part as on the whole array, once their size parameters are those of the part.
Primitives that depend on the position of the part have a rule here: lookups and scattered updates by index, arrays made
by position, maxima over several devices, and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays, summed
from pase.backends.jax.ops.fourier import transformed
from pase.backends.jax.ops.jaxprs import places_only, unmerged
from pase.backends.jax.spmd.call import MANUAL_RULES, ManualCall, NotLowered, split_dims
from pase.backends.jax.spmd.collectives import there_and_back
from pase.backends.jax.spmd.generated import generated
from pase.backends.jax.spmd.halo import WINDOWED
from pase.errors import PaseError
from pase.frontends.jax.attention import call_of
from pase.frontends.jax.contexts import without_mesh
from pase.frontends.jax.control import CONTROL
from pase.frontends.jax.rules import RULES, SCATTERS, gather_windows, moving, scatter_windows
from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import evaluate as plain
from pase.frontends.jax.versions import source_line
from pase.ir import Size
from pase.local.reshard import part, places_of
from pase.local.types import Extents, LocalOperand, LocalProgram, LocalResult

if TYPE_CHECKING:
    from jax import Array
    from jax.stages import Traced
    from jax.typing import DTypeLike

    from pase.backends.jax.spmd.values import DeviceValue
    from pase.frontends.jax.versions import DebugInfo

__all__ = ["ManualCall", "NotLowered", "check_sums", "evaluate", "plainly"]


def evaluate(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """The equation's results on this device. Raises NotLowered if it cannot run on parts."""
    op, name = call.op.op, call.eqn.primitive.name
    if name not in WINDOWED and any(o is not None and o.halo for o in call.operands):
        raise NotLowered(
            "its window moves along a split dim, and it has no rule for exchanging halos with neighbours"
        )
    rule = {"generate": generated, "attention": _attention}.get(op.kind) or MANUAL_RULES.get(name) or _alike
    try:
        outs = (rule if call.draw is None else generated)(call, ins)
    except (TypeError, ValueError) as e:
        if isinstance(e, PaseError):
            raise
        raise NotLowered(f"JAX refuses it on parts: {str(e).splitlines()[0]}") from e
    if op.kind == "opaque" and name not in RULES and name not in CONTROL:
        _check_compiles(call, ins)
    for x, shape in zip(outs, call.shapes, strict=True):
        if shape is not None and tuple(x.shape) != shape:
            raise NotLowered(f"its result on parts has shape {tuple(x.shape)}, but the plan has {shape}")
    return [x if r is None else _summed(call, x, r) for x, r in zip(outs, call.results, strict=True)]


def _check_compiles(call: ManualCall, ins: Sequence[Array]) -> None:
    """Raises NotLowered if a primitive of another library cannot be compiled inside ``shard_map``, or its derivative.

    JAX runs such a library's code when it compiles the step, after the walk. An error would then reach the user, and
    the annotated lowering could not take over.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    floats = [i for i, x in enumerate(ins) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def forward_and_backward(*xs: Array) -> list[Array]:
        def made(*given: Array) -> list[Array]:
            whole = dict(zip(floats, given, strict=True))
            outs = plain(call.eqn, [whole.get(i, x) for i, x in enumerate(xs)], call.info)
            return [x for x in outs if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)]

        outs, pull = jax.vjp(made, *(xs[i] for i in floats))
        return [*outs, *pull([jnp.ones_like(x) for x in outs])]

    def forward(*xs: Array) -> list[Array]:
        return [x for x in plain(call.eqn, list(xs), call.info) if x is not None]

    def traced(fn: Callable[..., list[Array]]) -> Traced:
        whole = PartitionSpec()
        mapped = jax.shard_map(fn, mesh=call.devices, in_specs=whole, out_specs=whole, check_vma=False)
        return jax.jit(mapped).trace(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ins))

    with without_mesh():
        try:
            step = traced(forward_and_backward if floats and call.op.op.differentiable else forward)
        except Exception:  # it has no derivative by all operands at once; the walk differentiates it by some
            step = traced(forward)
        try:
            step.lower()
        except Exception as e:  # the library's own code may raise anything
            said = str(e).strip().partition("\n")[0]
            raise NotLowered(f"its library cannot compile it on parts: {type(e).__name__}: {said}") from e


def check_sums(
    program: LocalProgram, values: Sequence[DeviceValue], operands: Sequence[LocalOperand | None]
) -> None:
    """Raises NotLowered if the gradient of an operand is a sum over devices of summands with eight bits.

    On one device, a product accumulates in the dtype of its result, and only the sum is rounded.
    """
    import jax.numpy as jnp

    for h, o in zip(values, operands, strict=True):
        dtype = getattr(h.array, "dtype", None)
        if o is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            continue
        back = o.transfer is not None and program.transfers[o.transfer].backward is not None
        if jnp.finfo(dtype).bits <= 8 and (o.summed or (back and "partial" in o.gradient)):
            raise NotLowered(
                f"the gradient of '{o.tensor}' is a sum over devices, and each would round its summand to {dtype}"
            )


def _summed(call: ManualCall, x: Array, result: LocalResult) -> Array:
    """The result, reduced at once if the node that makes it also reads it. Every summand gets the sum's gradient."""
    import jax

    over, combine = result.summed, call.op.combine
    if not result.partial_over(call.mesh):
        return x
    if combine != "sum" and call.eqn.primitive.name not in (*EXTREMES, *_SCATTERED_EXTREMES):
        raise NotLowered("no collective reduces its partial results")
    if not over or combine != "sum":
        return x  # the edge reduces it, or it is a maximum, whose rule has reduced it
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        return summed(x, over)
    return there_and_back(x, None, lambda x: summed(x, over), lambda g: g)


def plainly(eqn: Eqn, ins: Sequence[Array], info: DebugInfo) -> list[Array]:
    """The results of the equation on whole arrays."""
    return list(ins) if places_only(eqn) else plain(eqn, ins, info)


_SIZES: dict[str, Callable[[Mapping[str, object], Extents, Sequence[Extents]], dict[str, object]]] = {
    "broadcast_in_dim": lambda p, out, ins: {"shape": out},
    "reshape": lambda p, out, ins: {"new_sizes": out},
    "dynamic_slice": lambda p, out, ins: {"slice_sizes": out},
}
"""Primitive -> its size parameters on a part, from (parameters, local shape of the result, those of the operands)."""


def _resized(eqn: Eqn, out: Extents | None, ins: Sequence[Array]) -> Eqn:
    """The equation with size parameters for the parts. out: the local shape of its result."""
    sizes = _SIZES.get(eqn.primitive.name)
    if sizes is None or out is None:
        return eqn
    return eqn.replace(params={**eqn.params, **sizes(eqn.params, out, [x.shape for x in ins])})


def _alike(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """The rule of primitives that do the same on a part as on the whole array."""
    out = next((s for s in call.shapes if s is not None), None)
    return plain(_resized(call.eqn, out, ins), ins, call.info)


@MANUAL_RULES.register("fft")
def _fft(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    return [transformed(call.eqn, ins[0])]


@MANUAL_RULES.register("slice")
def _slice(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """A slice keeps all of a split dim, or takes the same share of every part."""
    p, whole, here = call.eqn.params, call.whole(), ins[0].shape
    start, limit = (
        [at * n // all_ for at, n, all_ in zip(p[k], here, whole, strict=True)]
        for k in ("start_indices", "limit_indices")
    )
    changed = p | {"start_indices": tuple(start), "limit_indices": tuple(limit)}
    return plain(call.eqn.replace(params=changed), ins, call.info)


@MANUAL_RULES.register("stack")
def _stack(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """Constants among the arrays are whole, and are cut as the others are."""
    axis, wanted, (r,) = call.eqn.params["axis"], call.shapes[0], call.op.results
    here = None if wanted is None else (*wanted[:axis], *wanted[axis + 1 :])
    layout, arrays = r.layout.renumbered(lambda d: d - (d > axis)), JaxArrays(call.mesh)
    parts = [
        x if here in (None, x.shape) else part(x, call.whole(i), layout, arrays) for i, x in enumerate(ins)
    ]
    return plain(call.eqn, parts, call.info)


@MANUAL_RULES.register("sharding_constraint", "device_put")
def _placed(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """The plan has its own layouts, so those that the user's program asks for are ignored."""
    return plainly(call.eqn, ins, call.info)


@MANUAL_RULES.register("shard_map")
def _manual(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    raise NotLowered("it has its own mesh")


_SCATTERED_EXTREMES = tuple(f"scatter{between}{how}" for how in ("min", "max") for between in "-_")
EXTREMES = ("reduce_max", "reduce_min", "reduce_or", "reduce_and", "pmax", "pmin")
"""Primitives whose partial results this rule reduces. The last two reduce over an axis of ``vmap``."""


@MANUAL_RULES.register(*EXTREMES)
def _extreme(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """Maxima and minima over several devices. All elements that attain one share its gradient, as on one device.

    If the edge reduces the parts, backward finds these elements again. ``reduce_or`` is a maximum of booleans,
    ``reduce_and`` a minimum.
    """
    import jax
    import jax.numpy as jnp

    (x,), axes = ins, tuple(call.eqn.params["axes"])
    (r,) = call.op.results
    if not split_dims(call, ins) & set(axes):
        return plain(call.eqn, ins, call.info)
    over, later, combine = r.partial_over(call.mesh), not r.summed, call.op.combine
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        here = plain(call.eqn, [x], call.info)[0]
        return [here if later else summed(here, over, combine)]

    @jax.custom_vjp
    def extreme(x: Array) -> Array:
        here = plain(call.eqn, [x], call.info)[0]
        return here if later else summed(here, over, combine)

    def forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
        top = extreme(x)
        return top, (x, top)

    def backward(kept: tuple[Array, Array], g: Array) -> tuple[Array]:
        x, top = kept
        top = summed(top, over, combine) if later else top
        reached = (x == jnp.expand_dims(top, axes)).astype(g.dtype)
        shares = summed(reached.sum(axes), over)
        return (reached * jnp.expand_dims(g / shares, axes),)

    extreme.defvjp(forward, backward)
    return [extreme(x)]


@MANUAL_RULES.register("gather")
def _gather(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """A lookup. Along a split dim, each device looks up the rows that it has and takes zero for others; the rows are
    then summed over the devices."""
    import jax
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode as Mode

    x, ids = ins
    p, whole = call.eqn.params, call.whole()
    d, operand = p["dimension_numbers"], call.operands[0]
    sizes = tuple(
        n if size == all_ else size for size, n, all_ in zip(p["slice_sizes"], x.shape, whole, strict=True)
    )
    windows = gather_windows(call.eqn)
    looked_up = sorted(split_dims(call, ins) & set(moving(d.start_index_map, windows, whole, p["mode"])))
    changed = p | {"slice_sizes": sizes}
    if not looked_up or operand is None:
        return plain(call.eqn.replace(params=changed), ins, call.info)
    if any(p["slice_sizes"][dim] != 1 for dim in looked_up):
        raise NotLowered("it looks up more than one element at a time along a split dim")
    here, mine, inside = _local_ids(call, ids, d.start_index_map, looked_up, windows)
    out = plain(call.eqn.replace(params=changed | {"mode": Mode.CLIP}), [x, here], call.info)[0]
    batch = [i for i in range(out.ndim) if i not in d.offset_dims]

    def over_rows(flags: Array) -> Array:
        return jax.lax.broadcast_in_dim(flags, out.shape, batch)

    out = jnp.where(over_rows(mine), out, jnp.zeros((), out.dtype))
    if inside is not None:  # out of bounds: the fill value, on one device
        fill = p["fill_value"]
        if fill is None:
            fill = jnp.nan if jnp.issubdtype(out.dtype, jnp.inexact) else _filler(out.dtype)
        axes = [call.mesh.names[axis] for axis, digit in operand.layout.digits if digit.dim in looked_up]
        missed = ~inside & (JaxArrays(call.mesh).number(axes) == 0)
        out = jnp.where(over_rows(missed), jnp.asarray(fill, out.dtype), out)
    return [out]


def _filler(dtype: DTypeLike) -> int:
    """JAX's fill value for out-of-bounds lookups: the smallest signed integer, the largest unsigned one."""
    import numpy as np

    if np.dtype(dtype) == np.bool_:
        return True
    info = np.iinfo(dtype)
    return info.min if info.min < 0 else info.max


def _local_ids(
    call: ManualCall, ids: Array, index_map: Sequence[int], dims: Sequence[int], windows: Mapping[int, Size]
) -> tuple[Array, Array, Array | None]:
    """(indices into this device's part, whether they lie in it, whether their windows lie in the whole array).

    The last is None if the mode does not fill or drop windows that are out of bounds. dims: the split dims along which
    windows of one element lie at several places.
    """
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode as Mode

    operand = call.operands[0]
    assert operand is not None
    devices, columns = JaxArrays(call.mesh), [ids[..., k] for k in range(ids.shape[-1])]
    mine = jnp.ones(ids.shape[:-1], bool)
    inside: Array = jnp.ones(ids.shape[:-1], bool)
    mode = call.eqn.params["mode"]
    for k, dim in enumerate(index_map):
        last = operand.shape[dim] - int(windows[dim])
        if mode == Mode.CLIP:
            columns[k] = jnp.clip(columns[k], 0, last)
        inside &= (columns[k] >= 0) & (columns[k] <= last)
        if dim in dims:
            columns[k], here = places_of(columns[k], dim, operand.shape, operand.layout, devices)
            mine &= here
    fills = mode == Mode.FILL_OR_DROP
    return jnp.stack(columns, axis=-1), mine & inside if fills else mine, inside if fills else None


@MANUAL_RULES.register(*SCATTERS)
def _scatter(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """An update by index. Each device applies the updates that fall into its part.

    If the result is a partial sum, only the first device contributes the array that the updates are added to. A partial
    maximum has a derivative of its own (``_scattered_extreme``).
    """
    import jax.numpy as jnp
    from jax.lax import GatherScatterMode as Mode

    x, ids, updates = ins
    p = call.eqn.params
    d = p["dimension_numbers"]
    (r,) = call.op.results
    partial = r.partial_over(call.mesh)
    if partial and call.op.combine == "sum":
        x = JaxArrays(call.mesh).on_first(x, partial)
    eqn, windows, at = call.eqn, scatter_windows(call.eqn), d.scatter_dims_to_operand_dims
    fallen = sorted(split_dims(call, ins) & set(moving(at, windows, call.whole(), p["mode"])))
    if fallen:
        if set(fallen) - set(d.inserted_window_dims):
            raise NotLowered("it updates more than one element at a time along a split dim")
        here, mine, _ = _local_ids(call, ids, at, fallen, windows)
        ids = jnp.where(mine[..., None], here, jnp.asarray(max(x.shape), here.dtype))
        x, eqn = unmerged(x), eqn.replace(params=p | {"mode": Mode.FILL_OR_DROP})
    if partial and eqn.primitive.name in _SCATTERED_EXTREMES:
        return [_scattered_extreme(call, eqn, x, ids, updates)]
    return plain(eqn, [x, ids, updates], call.info)


def _scattered_extreme(call: ManualCall, eqn: Eqn, x: Array, ids: Array, updates: Array) -> Array:
    """A maximum or minimum of updates by index that several devices have. All updates that attain it share its gradient
    with the array that is updated, as on one device; the first device has the array's share."""
    import jax

    (r,) = call.op.results
    over, later, combine, p = r.partial_over(call.mesh), not r.summed, call.op.combine, eqn.params

    # The indices are an argument of its own, because a derivative rule must not refer to values of the trace around it.
    def extreme(x: Array, ids: Array, updates: Array) -> Array:
        here = plain(eqn, [x, ids, updates], call.info)[0]
        return here if later else summed(here, over, combine)

    def added(ids: Array, updates: Array) -> Array:
        zeros = jax.numpy.zeros(x.shape, updates.dtype)
        return jax.lax.scatter_add(zeros, ids, updates, p["dimension_numbers"], mode=p["mode"])

    def backward(kept: tuple[Array, Array, Array, Array], g: Array) -> tuple[Array, None, Array]:
        x, ids, updates, top = kept
        top = summed(top, over, combine) if later else top
        _, at_updates = jax.vjp(lambda u: added(ids, u), updates)
        reached = (updates == at_updates(top)[0]).astype(g.dtype)
        share = g / jax.numpy.maximum(summed(added(ids, reached), over) + (x == top), 1)
        own = jax.numpy.where(x == top, share, 0)
        return JaxArrays(call.mesh).on_first(own, over), None, reached * at_updates(share)[0]

    def forward(x: Array, ids: Array, updates: Array) -> tuple[Array, tuple[Array, Array, Array, Array]]:
        top = extreme(x, ids, updates)
        return top, (x, ids, updates, top)

    if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        return extreme(x, ids, updates)
    shared = jax.custom_vjp(extreme)
    shared.defvjp(forward, backward)
    return shared(x, ids, updates)


def _attention(call: ManualCall, ins: Sequence[Array]) -> list[Array]:
    """Attention on a device's part of the batch, heads and queries, with the kernel that the program asks for."""
    from pase.backends.jax.ops import attention

    asked = call_of(call.eqn)
    assert asked is not None  # the frontend makes attention ops of such calls only
    read = [(o.shape, o.layout) for o in call.operands if o is not None]
    if len(read) != len(ins) or any("partial" in layout for _, layout in read):
        raise NotLowered("one of its operands is a literal or a partial sum")
    run = attention.on_a_device(
        asked,
        read,  # type: ignore[arg-type]
        call.mesh,
        call.devices,
        source_line(call.eqn),
        ins[0].dtype,
    )
    if run is None:
        raise NotLowered("its heads or queries cannot be computed part by part")
    return [run(*ins)]
