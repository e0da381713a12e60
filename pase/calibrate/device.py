"""Runs tasks as JAX programs: each repeats one op in a loop, on every device at the same time, as in training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pase.calibrate.here import others_s
from pase.calibrate.types import LIGHT_SHAPES, Task
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

    from pase.calibrate.here import Here

__all__ = ["Devices", "block_loss", "local_program", "sets_of"]

_SHARED = 64
_VECTOR_DEPTH = 64
_LAUNCHES = 16
_PASSED_BYTES, _MOST_SETS = 1 << 24, 16
"""The bytes touched between two uses of an operand, unless that needs more than _MOST_SETS sets of operands. This
exceeds a core's private caches, and even a small training step touches as much."""


_OpOperands = list[tuple[tuple[int, ...], str]]
"""Shapes and dtypes of a program's operands on one device."""
OpProgram: TypeAlias = "tuple[_OpOperands, Callable[..., Tree], int]"
"""Operands, the op (a function that returns one or several arrays), and the number of ops that one call represents."""


def _matmul(task: Task) -> OpProgram:
    from jax import lax

    batch, m, n, k = task.extents
    form = task.op.removeprefix("matmul.")
    left, right = ((k, m) if form == "tn" else (m, k)), ((n, k) if form == "nt" else (k, n))
    b = (batch,) if batch > 1 else ()
    d = len(b)
    contract = ((d,) if form == "tn" else (d + 1,), (d + 1,) if form == "nt" else (d,))
    batched = tuple(range(d))

    def product(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, (contract, (batched, batched)))

    return [((*b, *left), task.dtype), ((*b, *right), task.dtype)], product, 1


def _convolution(task: Task, on_cpu: bool) -> OpProgram:
    import jax
    from jax import lax

    images, side, c_in, c_out, window = task.extents
    x_shape, w_shape = (images, side, side, c_in), (window, window, c_in, c_out)
    y_shape = (images, side, side, c_out)

    def conv(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    if task.op == "conv.forward":
        return [(x_shape, task.dtype), (w_shape, task.dtype)], conv, 1
    which = 0 if task.op == "conv.input" else 1
    other = (w_shape, x_shape)[which]
    if on_cpu:
        # XLA's CPU compiler rewrites convolutions into the form of its fast kernels (ConvCanonicalization), but not
        # inside loops. Convolutions of a training step are not in a loop but these are, so write that form directly.
        if which == 0:
            return (
                [(y_shape, task.dtype), (w_shape, task.dtype)],
                lambda y, w: conv(y, lax.rev(w, (0, 1)).transpose(0, 1, 3, 2)),
                1,
            )
        edge = (window // 2, (window - 1) // 2)

        def filters(y: Array, x: Array) -> Array:
            kernel, image = y.transpose(1, 2, 0, 3), x.transpose(3, 1, 2, 0)
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(image, kernel, (1, 1), (edge, edge), dimension_numbers=numbers)

        return [(y_shape, task.dtype), (x_shape, task.dtype)], filters, 1

    def gradient(y: Array, operand: Array) -> Array:
        given = jax.ShapeDtypeStruct((x_shape, w_shape)[which], task.dtype)
        f = (lambda x: conv(x, operand)) if which == 0 else (lambda w: conv(operand, w))
        return jax.linear_transpose(f, given)(y)[0]

    return [(y_shape, task.dtype), (other, task.dtype)], gradient, 1


def _window(task: Task) -> OpProgram:
    """Returns max pooling and its gradient."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    images, side, channels, window = task.extents
    out = (side - window) // 2 + 1

    def pool(x: Array) -> Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, 2, 2, 1), "VALID")

    def both(x: Array, y: Array) -> Tree:
        made, back = jax.vjp(pool, x)
        return [made, back(y)[0]]

    shapes = ((images, side, side, channels), (images, out, out, channels))
    return [(shape, task.dtype) for shape in shapes], both, 1


def local_program(task: Task, on_cpu: bool = False) -> OpProgram:
    """Returns the program that a task runs on one device.

    on_cpu: use the form into which XLA's CPU compiler rewrites the op in a training step.
    """
    import jax.numpy as jnp

    if task.op.startswith("matmul"):
        return _matmul(task)
    if task.op.startswith("conv"):
        return _convolution(task, on_cpu)
    if task.op == "window":
        return _window(task)
    elements = max(task.nbytes // 4, 1)
    if task.op == "elementwise":  # reads half of the bytes and writes the other half
        return [((max(elements // 2, 1),), "float32")], lambda x: x * 0.5 + 1.0, 1
    if task.op == "reduction":
        width = min(elements, 1024)
        return [((elements // width, width), "float32")], lambda x: jnp.sum(x, axis=1), 1
    if task.op == "vector":

        def deep(x: Array) -> Array:
            for i in range(_VECTOR_DEPTH):
                x = x * 0.999 + 0.001 * (i + 1)
            return x

        # The task's work is its number of bytes, and one op counts as that many FLOPs.
        return [((elements,), "float32")], deep, 2 * _VECTOR_DEPTH * elements // task.nbytes
    if task.op == "light":
        narrow, wide = LIGHT_SHAPES
        return [(shape, "float32") for shape in (narrow, narrow, narrow, narrow, wide, wide, wide)], _light, 1
    if task.op == "launch":

        def chain(x: Array, w: Array) -> Array:
            for _ in range(_LAUNCHES):
                x = x @ w
            return x

        return [((8, 8), "float32"), ((8, 8), "float32")], chain, _LAUNCHES
    if task.op == "dispatch":
        return [((8,), "float32")], lambda x: x + 1.0, 1
    raise ValueError(f"no program for {task.key}")


def _in_turns(op: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns f(iterations, operand sets, results) -> (sets, results), which applies the op to each set in every
    iteration.

    Before each op, one element of the set's first operand is overwritten by a value that depends on the previous
    results. So the compiler cannot skip, hoist or merge any op, and nothing needs to be copied.
    """
    import jax
    from jax import lax

    def local(iterations: Tree, sets: Tree, results: Tree) -> Tree:
        sets, results = jax.tree.map(lambda x: x[0], (sets, results))

        def iteration(_: object, carry: Tree) -> Tree:
            sets, results = carry
            last, after, made = results[-1], [], []
            for first, *rest in sets:
                seeds = [x.ravel()[:1].astype(first.dtype) for x in jax.tree.leaves(last)]
                seed = sum(seeds[1:], seeds[0]).reshape((1,) * first.ndim)
                first = lax.dynamic_update_slice(first, seed, (0,) * first.ndim)
                last = op(first, *rest)
                after.append([first, *rest])
                made.append(last)
            return after, made

        done = lax.fori_loop(0, iterations, iteration, (sets, results))
        return jax.tree.map(lambda x: x[None], done)

    return local


def sets_of(task: Task, arrays: _OpOperands) -> int:
    """Returns the number of operand sets that an op cycles through, from one set's operands and results.

    In a training step, other arrays are used between two uses of an operand, weights in particular. A measurement on a
    single set would find small operands in the core's private cache and take half as long. Collectives, and ops whose
    time does not depend on reading operands, have one set.
    """
    if task.ways or task.op in ("vector", "launch", "dispatch"):
        return 1
    nbytes = sum(math.prod(shape) * (4 if dtype == "float32" else 2) for shape, dtype in arrays)
    return max(1, min(_MOST_SETS, math.ceil(_PASSED_BYTES / nbytes)))


def _normed(x: Array) -> Array:
    import jax
    import jax.numpy as jnp

    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)


def _cross_entropy(logits: Array) -> Array:
    import jax
    import jax.numpy as jnp

    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def block_loss(x: Array, up: Array, down: Array, out: Array) -> Array:
    """Returns the loss of a transformer's normalized feed-forward block, with an output projection."""
    import jax
    import jax.numpy as jnp

    hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", _normed(x), up))
    x = x + jnp.einsum("bsf,fd->bsd", hidden, down)
    return _cross_entropy(jnp.einsum("bsd,dv->bsv", x, out))


def _light(
    x: Array, beside: Array, to_norm: Array, to_sum: Array, hidden: Array, to_hidden: Array, logits: Array
) -> Tree:
    """Runs a step of ``block_loss``, forward and backward, without its matrix products, whose results are arguments.

    beside: the result that is added to x.
    to_norm, to_sum, to_hidden: the gradients that the products of backward return.
    """
    import jax

    normed, norm_back = jax.vjp(_normed, x)
    active, gelu_back = jax.vjp(jax.nn.gelu, hidden)
    loss, loss_back = jax.vjp(_cross_entropy, logits)
    back = (loss_back(loss)[0], gelu_back(to_hidden)[0], norm_back(to_norm)[0] + to_sum)
    return [loss, normed, active, x + beside, *back]


def _collective_program(
    task: Task, axes: tuple[str, ...], on_cpu: bool
) -> tuple[list[tuple[tuple[int, ...], str]], Callable[..., Array], int]:
    from jax import lax

    total = math.prod(task.ways)
    n = task.nbytes // 4
    local = (n // total if task.op == "all_gather" else n,)

    def run(x: Array) -> Array:
        match task.op:
            case "all_reduce":
                return lax.psum(x, axes)
            case "all_gather":
                return lax.all_gather(x, axes, tiled=True)
            case "all_to_all":
                return lax.all_to_all(x, axes, 0, 0, tiled=True)
            case "permute":
                return lax.ppermute(x, axes, [(i, (i + 1) % total) for i in range(total)])
            case "broadcast" if (
                on_cpu
            ):  # XLA's CPU runtime has no broadcast; its partitioner all-reduces one shard with zeros
                return lax.psum(x * (lax.axis_index(axes) == 0), axes)
            case "broadcast":
                return lax.pbroadcast(x, axes, 0)
            case "reduce_scatter" if on_cpu:
                # XLA's CPU partitioner makes no reduce-scatter, but an all-reduce and a slice.
                return lax.dynamic_slice(
                    lax.psum(x, axes), (lax.axis_index(axes) * (n // total),), (n // total,)
                )
            case "reduce_scatter":
                return lax.psum_scatter(x, axes, tiled=True)
        raise ValueError(f"no program for {task.key}")

    return [(local, "float32")], run, 1


class Devices:
    """A Bench on the devices of ``Here``. All devices run the same op, and all groups communicate, at the same time."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self._mesh_of: dict[tuple[int, ...], JaxMesh] = {}
        self._gather: Callable[[np.ndarray], np.ndarray] | None = None

    def now(self) -> float:
        return time.perf_counter()

    def others_s(self) -> float:
        alone = self.here.platform == "cpu" and self.here.processes == 1
        return others_s() if alone else 0.0

    def share(self, values: list[float]) -> list[list[float]]:
        if self.here.processes == 1:
            return [list(values)]
        from jax.experimental import multihost_utils

        row = np.zeros(_SHARED, np.float32)
        row[: len(values)] = values
        rows = np.asarray(multihost_utils.process_allgather(row)).reshape(self.here.processes, _SHARED)
        return [[float(x) for x in r[: len(values)]] for r in rows]

    def _launches(self, task: Task) -> Callable[[int], float]:
        """Returns a timer for the host's launches, while the host runs ahead of the devices.

        It launches either a compiled program on all devices of this process ("host.program"), or a single op outside
        of any program, as an eager framework does ("host.op").
        """
        import jax
        import jax.numpy as jnp

        mine = [d for d in self.here.devices if d.process_index == jax.process_index()]
        if task.op == "host.program":
            mesh = jax.sharding.Mesh(np.array(mine), ("here",))
            spread_out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("here"))
            x = jax.device_put(np.zeros((len(mine), 8), np.float32), spread_out)
            program: Callable[[Array], Array] = jax.jit(lambda x: x + 1.0).lower(x).compile()
        else:
            x = jax.device_put(np.zeros(8, np.float32), mine[0])

            def program(x: Array) -> Array:
                return jnp.add(x, x)

        def run(inner: int) -> float:
            began = time.perf_counter()
            y = x
            for _ in range(inner):
                y = program(y)
            took = time.perf_counter() - began
            jax.block_until_ready(y)
            return took

        return run

    def _mesh(self, ways: tuple[int, ...]) -> tuple[JaxMesh, tuple[str, ...]]:
        """Returns (mesh, axes of the group members). The mesh has two axes per level, outermost level first: the
        groups of that level, and the members of a group."""
        from jax.sharding import Mesh

        sizes, names, members = [], [], []
        for l in reversed(range(len(ways))):
            sizes += [self.here.levels[l].ways // ways[l], ways[l]]
            names += [f"beside{l}", f"level{l}"]
            if ways[l] > 1:
                members.append(f"level{l}")
        if ways not in self._mesh_of:
            self._mesh_of[ways] = Mesh(np.array(self.here.devices).reshape(sizes), tuple(names))
        return self._mesh_of[ways], tuple(members)

    def prepare(self, task: Task) -> Callable[[int], float]:
        """See ``Bench``."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        if task.op.startswith("host."):
            return self._launches(task)
        ways = task.ways or tuple(level.ways for level in self.here.levels)
        mesh, members = self._mesh(ways)
        on_cpu = self.here.platform == "cpu"
        if task.ways:
            shapes, op, ops = _collective_program(task, members, on_cpu)
        else:
            shapes, op, ops = local_program(task, on_cpu)
        spec = PartitionSpec(mesh.axis_names)
        sharding = NamedSharding(mesh, spec)
        # No check_vma: neither the values nor the axes along which they vary matter here.
        program = jax.jit(
            jax.shard_map(
                _in_turns(op),
                mesh=mesh,
                in_specs=(PartitionSpec(), spec, spec),
                out_specs=spec,
                check_vma=False,
            ),
            donate_argnums=(1, 2),
        )

        def filled(shape: tuple[int, ...], dtype: str, value: float) -> Array:
            mine = np.full((1, *shape), value, jnp.dtype(dtype))
            whole = (len(self.here.devices), *shape)
            return jax.make_array_from_callback(whole, sharding, lambda _: mine)

        def mapped(*xs: Array) -> Tree:
            return jax.tree.map(lambda y: y[None], op(*(x[0] for x in xs)))

        one = [jax.ShapeDtypeStruct((len(self.here.devices), *shape), dtype) for shape, dtype in shapes]
        whole = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        result_shapes = jax.eval_shape(whole, *one)
        made = [(r.shape[1:], str(r.dtype)) for r in jax.tree.leaves(result_shapes)]
        count = sets_of(task, [*shapes, *made])
        fill = 0.0 if task.ways else 0.25
        sets = [[filled(shape, dtype, fill) for shape, dtype in shapes] for _ in range(count)]
        results = [
            jax.tree.map(lambda r: filled(r.shape[1:], str(r.dtype), 0.0), result_shapes)
            for _ in range(count)
        ]
        state = (sets, results)
        compiled = program.lower(np.int32(1), *state).compile()

        def run(inner: int) -> float:
            nonlocal state
            iterations = math.ceil(inner / count)
            began = time.perf_counter()
            state = compiled(np.int32(iterations), *state)
            jax.block_until_ready(state)
            return (time.perf_counter() - began) / ops * inner / (iterations * count)

        return run
