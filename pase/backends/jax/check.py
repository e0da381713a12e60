"""``plan.jax.check``: tests whether the gradient of a plan's step is the slope of its own loss.

All computation runs on the plan's devices and in its layouts. The directions of the lines have the layouts of the
gradients. No array is gathered on one device or on the host, except for the unsharded reference step, which runs only
if it fits on one device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.frontends.jax.doubts import doubts
from pase.plan.gradient_check import GradientCheck, GradientDifference, GradientReference
from pase.plan.gradient_lines import CheckedPlan, CheckLines, gradient_check
from pase.plan.gradient_steps import JITTER, POINTS, AlongLine, Line, uphill_factors, zero_scales
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Sharding

    from pase.frontends.jax.frontend import TracedJax

__all__ = ["CheckedProgram", "JaxSteps", "check_of"]


@dataclass(frozen=True, kw_only=True)
class CheckedProgram:
    """A plan's program as the check runs it.

    run: (params, *batch) -> (results of the user's function, the loss first; gradients of the trained leaves), on
    trees of placed arrays. params, batch: these trees. owners: for each array of the trained leaves, the index of its
    parameter in ``names`` (a leaf may be cut into several arrays). own_shapes: for each of these arrays, its shape
    without the plan's padding. lowering: a description of the lowering for the report.
    """

    run: Callable[..., tuple[Tree, Tree]]
    params: Tree
    batch: tuple[Tree, ...]
    names: tuple[str, ...]
    owners: tuple[int, ...]
    own_shapes: tuple[tuple[int, ...], ...]
    lowering: str
    coarsest: float
    """The spacing of numbers just above 1 in the coarsest dtype that the program computes in."""


def check_of(
    program: CheckedProgram,
    traced: TracedJax,
    devices: int,
    reference: Callable[[JaxSteps], GradientReference | str],
    remarks: list[str],
    lines: CheckLines,
) -> GradientCheck:
    """Run the check.

    reference: computes the reference's gradients from the steps at their first point, or returns a text that says why
    there is no reference. It may add to the remarks.
    """
    lines.told("the step near the given parameters")
    steps = JaxSteps(program=program, seed=lines.seed)
    lines.told("another program to compare with")
    found = reference(steps)
    plan = CheckedPlan(model=traced.graph.name, devices=devices, lowering=program.lowering, remarks=remarks)
    return gradient_check(steps, found, doubts(traced), plan, lines)


class JaxSteps:
    """Runs the steps of one program along lines (implements ``GradientSteps``)."""

    def __init__(self, *, program: CheckedProgram, seed: int) -> None:
        import jax

        self.program, self.count = program, 0
        flat, self._tree = jax.tree.flatten(program.params)
        self._trained = [k for k, x in enumerate(flat) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
        self._all = flat
        self._given = given = [flat[k] for k in self._trained]
        self.start = self._perturbed_randomly(seed)
        self.results, self.gradient_tree = self._step(self.start)
        self.jittered = math.isfinite(float(self.results[0]))
        if not self.jittered:
            self.start = given
            self.results, self.gradient_tree = self._step(self.start)
        self.gradients = _leaves(self.gradient_tree)

    @property
    def names(self) -> Sequence[str]:
        return self.program.names

    @property
    def coarsest(self) -> float:
        return self.program.coarsest

    @cached_property
    def loss(self) -> float:
        """The loss at the first point. Raises PaseError if it is not the same on every device."""
        low, high = _extremes(self.results[0])
        found = float(self.results[0])
        if high - low > 32 * self._loss_eps * abs(found):
            raise PaseError(
                f"the loss of this step differs between devices: it ranges from {low:.8g} to {high:.8g}",
                fix="please report it with the plan (plan.save)",
            )
        return found

    @cached_property
    def copies(self) -> tuple[GradientDifference, ...]:
        import jax

        shardings = [x.sharding for x in self.gradients]
        pairs: dict[int, tuple[Array, Array]] = {}
        for some in self._together:
            here = [shardings[k] for k in some]
            check = jax.jit(lambda *xs, here=here: list(map(_copies_apart, xs, here)))
            pairs |= zip(some, check(*(self.gradients[k] for k in some)), strict=True)
        found = [pairs[k] for k in range(len(shardings))]
        apart, largest = np.zeros(len(self.names)), np.zeros(len(self.names))
        for i, (d, size) in zip(self.program.owners, found, strict=True):
            apart[i], largest[i] = np.maximum(apart[i], float(d)), np.maximum(largest[i], float(size))
        norms = self.gradient_norms
        noise = np.where(norms > 0, self.gradient_noise, 0.0) * norms
        return tuple(
            GradientDifference(
                name=name, difference=float(d), largest=float(r), noise=float(n), eps=self.coarsest
            )
            for name, d, r, n in zip(self.names, apart, largest, noise, strict=True)
        )

    def along(self, line: Line) -> AlongLine:
        """Run the step at each of the ``POINTS`` points of the line."""
        toward = self._direction(line)
        losses, slopes = [self.loss], [self._summed(self._dots(self.gradients, toward))]
        for k in range(1, POINTS):
            results, grads = self._step(self.at(toward, k / (POINTS - 1)))
            losses.append(float(results[0]))
            slopes.append(self._summed(self._dots(_leaves(grads), toward)))
        perturbed = np.sqrt(self._summed(self._squares(toward)))
        reach = self.gradient_norms * perturbed
        if line.direction == "random":
            reach = reach / np.sqrt(self._elements)
        return AlongLine(
            losses=np.array(losses),
            slopes=np.array(slopes),
            reach=reach,
            loss_eps=self._loss_eps,
            slope_eps=self.program.coarsest,
        )

    @cached_property
    def gradient_norms(self) -> np.ndarray:
        """[parameters]: the norm of each parameter's gradient at the first point."""
        return np.sqrt(self._summed(self._squares(self.gradients)))

    def at(self, toward: Sequence[Array], share: float) -> list[Array]:
        """The trained arrays at a point of a line, in the plan's layouts."""
        return self._each(
            "moved", _perturbed, self.start, self.start, toward, [np.float32(share)] * len(self.start)
        )

    def whole(self, mine: Sequence[Array]) -> Tree:
        """The parameters with these trained arrays."""
        import jax

        flat = list(self._all)
        for k, x in zip(self._trained, mine, strict=True):
            flat[k] = x
        return jax.tree.unflatten(self._tree, flat)

    def _step(self, mine: Sequence[Array]) -> tuple[list[Array], Tree]:
        """(What the function returns, leaf by leaf; gradients)."""
        self.count += 1
        results, grads = self.program.run(self.whole(mine), *self.program.batch)
        return _leaves(results), grads

    @cached_property
    def _loss_eps(self) -> float:
        import jax

        return float(jax.numpy.finfo(self.results[0].dtype).eps)

    def _perturbed_randomly(self, seed: int) -> list[Array]:
        toward = self._random("jitter", self._given, self._given, [JITTER] * len(self._given), seed + 7)
        return self._each(
            "moved", _perturbed, self._given, self._given, toward, [np.float32(1)] * len(self._given)
        )

    @cached_property
    def gradient_noise(self) -> np.ndarray:
        """[parameters]: the relative change of each gradient if every parameter moves by one unit in its last place."""
        import jax.numpy as jnp

        units = [float(jnp.finfo(x.dtype).eps) for x in self.start]
        toward = self._random("random", self.gradients, self.start, units, 11)
        other = self._step(self.at(toward, 1.0))[1]
        return np.sqrt(
            self._summed(self._each("apart", _apart_by, None, self.gradients, _leaves(other)))
        ) / np.where(self.gradient_norms > 0, self.gradient_norms, 1.0) + np.where(
            self.gradient_norms > 0, 0.0, np.inf
        )

    def _random(
        self, name: str, like: Sequence[Array], start: Sequence[Array], sizes: Sequence[float], seed: int
    ) -> list[Array]:
        keys = [np.array([seed, k], np.uint32) for k in range(len(sizes))]
        by = [np.float32(x) for x in sizes]
        return self._each(name, _randomly, like, start, self._given, by, keys, self._scales, self._own)

    def _direction(self, line: Line) -> list[Array]:
        perturbed = set(line.perturbed)
        if line.direction == "random":
            sizes = [line.size if i in perturbed else 0.0 for i in self.program.owners]
            return self._random("random", self.gradients, self.start, sizes, line.seed)
        factors = uphill_factors(line.size, self._given_squares, self._elements, self.gradient_norms)
        of = [np.float32(factors[i] if i in perturbed else 0.0) for i in self.program.owners]
        return self._each("uphill", _uphill, self.gradients, self.start, self.gradients, of, self._own)

    @cached_property
    def _scales(self) -> list[np.float32]:
        """How far zeros move, relative to the size of a line."""
        scales = zero_scales(self._given_squares, self._elements)
        return [np.float32(scales[i]) for i in self.program.owners]

    @cached_property
    def _given_squares(self) -> np.ndarray:
        return self._summed(self._each("given", _square, None, self._given))

    @cached_property
    def _own(self) -> list[tuple[int, ...]]:
        return list(self.program.own_shapes)

    @cached_property
    def _elements(self) -> np.ndarray:
        """[parameters]: the number of elements of each parameter, without padding."""
        return self._summed([float(math.prod(shape)) for shape in self.program.own_shapes])

    def _summed(self, of: Sequence[Array | float]) -> np.ndarray:
        """[parameters]: one number per array, summed over the arrays of each parameter."""
        out = np.zeros(len(self.program.names))
        for i, x in zip(self.program.owners, of, strict=True):
            out[i] += float(x)
        return out

    def _dots(self, grads: Sequence[Array], toward: Sequence[Array]) -> list[Array]:
        return self._each("dot", _dot, None, grads, toward)

    def _squares(self, of: Sequence[Array]) -> list[Array]:
        return self._each("square", _square, None, of)

    @cached_property
    def _together(self) -> list[list[int]]:
        """The arrays by the devices that they are on. One program can compute on all arrays of a group."""
        groups = defaultdict(list)
        for k, x in enumerate(self._given):
            mesh = getattr(x.sharding, "mesh", None)
            groups[frozenset(x.sharding.device_set) if mesh is None else tuple(mesh.devices.flat)].append(k)
        return [*groups.values()]

    @cached_property
    def _compiled(self) -> dict[str, list[Callable[..., list[Array]]]]:
        return {}

    def _each(
        self, name: str, fn: Callable[..., Array], like: Sequence[Array] | None, *columns: Sequence[Tree]
    ) -> list[Array]:
        """Apply fn to each array. The results have the layouts of ``like``.

        One compiled program computes on all arrays that are on the same devices.
        """
        import jax

        shardings = None if like is None else [x.sharding for x in like]
        given = [c for c in columns if c is not self._own]
        own = self._own if len(given) < len(columns) else None
        if name not in self._compiled:
            self._compiled[name] = [
                jax.jit(
                    _mapped(fn, None if own is None else [own[k] for k in some]),
                    out_shardings=None if shardings is None else [shardings[k] for k in some],
                )
                for some in self._together
            ]
        out = list(given[0])
        for some, program in zip(self._together, self._compiled[name], strict=True):
            for k, x in zip(some, program(*([c[k] for k in some] for c in given)), strict=True):
                out[k] = x
        return out


def _mapped(fn: Callable[..., Array], own: Sequence[tuple[int, ...]] | None) -> Callable[..., list[Array]]:
    """The function from columns of arrays to the results of ``fn`` on each row. own: its last, static arguments."""

    def of(*columns: Sequence[Array]) -> list[Array]:
        if own is None:
            return [fn(*xs) for xs in zip(*columns, strict=True)]
        return [fn(*xs, shape) for *xs, shape in zip(*columns, own, strict=True)]

    return of


def _copies_apart(x: Array, sharding: Sharding) -> tuple[Array, Array]:
    """(Largest difference between an array's replicas on different devices, its largest element), as absolute values.

    XLA assumes that replicas are equal, so only a program in shard_map can compare them.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    largest = jnp.max(jnp.abs(x), initial=0)
    if not isinstance(sharding, NamedSharding):
        return jnp.zeros_like(largest), largest
    mesh, spec = sharding.mesh, sharding.spec
    split = set(jax.tree.leaves(tuple(spec)))
    free = tuple(a for a in mesh.axis_names if a not in split and mesh.shape[a] > 1)
    if not free:
        return jnp.zeros_like(largest), largest

    def apart(mine: Array) -> Array:
        parts = [mine.real, mine.imag] if jnp.iscomplexobj(mine) else [mine]
        furthest = [jnp.max(jax.lax.pmax(p, free) - jax.lax.pmin(p, free), initial=0) for p in parts]
        return jax.lax.pmax(jnp.max(jnp.stack(furthest)), tuple(mesh.axis_names))

    check = jax.shard_map(apart, mesh=mesh, in_specs=(spec,), out_specs=PartitionSpec(), check_vma=False)
    return check(x), largest


def _extremes(x: Array) -> tuple[float, float]:
    """(Smallest, largest) of the copies of a scalar on this process's devices."""
    found = [float(shard.data) for shard in x.addressable_shards]
    return min(found), max(found)


def _wide(x: Array) -> Array:
    """The array in at least 32 bits."""
    import jax.numpy as jnp

    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _perturbed(x: Array, toward: Array, share: Array) -> Array:
    return (_wide(x) + share * _wide(toward)).astype(x.dtype)


def _to_end(x: Array, toward: Array, own: tuple[int, ...]) -> Array:
    """The direction from x to x + toward, rounded so that its end is a number of the dtype. Padding does not move."""
    import jax
    import jax.numpy as jnp

    for dim, (n, there) in enumerate(zip(own, x.shape, strict=True)):
        if n < there:
            toward = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) < n, toward, 0)
    end = (_wide(x) + toward).astype(x.dtype)
    # Without the barrier, the compiler may leave out the rounding.
    return (_wide(jax.lax.optimization_barrier(end)) - _wide(x)).astype(x.dtype)


def _randomly(x: Array, given: Array, size: Array, key: Array, scale: Array, own: tuple[int, ...]) -> Array:
    import jax
    import jax.numpy as jnp

    # One draw for both, which XLA compiles in half the time: upper bits are the size, and the lowest bit is the sign.
    bits = jax.random.bits(jax.random.wrap_key_data(key, impl="threefry2x32"), x.shape, jnp.uint32)
    by = 0.5 + (bits >> 8).astype(jnp.float32) * 2.0**-25
    far = jnp.abs(_wide(given))
    far = jnp.where(far > 0, far, scale) * by * size
    if jnp.iscomplexobj(x):
        turn = (bits & 255).astype(jnp.float32) * (2 * np.pi / 256)
        return _to_end(x, far * jnp.exp(1j * turn), own)
    return _to_end(x, far * jnp.where(bits & 1 == 1, 1, -1), own)


def _uphill(x: Array, gradient: Array, factor: Array, own: tuple[int, ...]) -> Array:
    import jax.numpy as jnp

    return _to_end(x, factor * jnp.conj(_wide(gradient)), own)


def _dot(gradient: Array, toward: Array) -> Array:
    """Re Σ g·D. For a complex parameter x + iy, jax.grad returns the derivative by x minus i times that by y."""
    import jax.numpy as jnp

    return jnp.sum(jnp.real(_wide(gradient) * _wide(toward)))


def _apart_by(x: Array, other: Array) -> Array:
    return _square(_wide(x) - _wide(other))


def _leaves(tree: Tree) -> list[Array]:
    import jax

    found: list[Array] = jax.tree.leaves(tree)
    return found


def _square(x: Array) -> Array:
    import jax.numpy as jnp

    return jnp.sum(jnp.square(jnp.abs(_wide(x))))
