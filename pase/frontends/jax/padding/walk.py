"""A walk over a jaxpr on padded arrays, with the operations that every padding rule needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pase.errors import PaseError
from pase.frontends.jax.types import Aval, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import evaluate, is_literal, literal_array, written_as
from pase.registry import Registry

if TYPE_CHECKING:
    from jax import Array

    from pase.frontends.jax.versions import DebugInfo

__all__ = ["PADDED", "Fill", "PaddedValue", "PaddedValues", "PaddedWalk"]


@dataclass(frozen=True)
class PaddedValue:
    """An array whose padding is finite. zero: the dims whose padding is known to be zero."""

    array: Array
    zero: frozenset[int] = frozenset()


PaddedValues: TypeAlias = Sequence[PaddedValue]
Fill: TypeAlias = float | int | bool
"""A value for padding."""

PaddedRule: TypeAlias = "Callable[[PaddedWalk, Eqn, Sequence[PaddedValue]], Sequence[PaddedValue]]"
"""Returns the results of an equation on values of which at least one is padded. Missing padding is added to results.
None means that the equation must run on unpadded values."""

PADDED: Registry[PaddedRule] = Registry(
    "padding rule for JAX primitive", package="pase.frontends.jax.padding"
)
"""Primitive -> its rule. A primitive without a rule runs on unpadded values."""


@dataclass(frozen=True, kw_only=True)
class PaddedWalk:
    """A walk over a jaxpr.

    sizes: extent -> padded extent, for every dim with such an extent.
    ruled: whether the program belongs to a user's derivative rule, which is not differentiated itself.
    """

    sizes: Mapping[int, int]
    ruled: bool = False

    def wide(self, aval: Aval) -> tuple[int, ...]:
        """The padded shape. Arrays of random keys are not padded."""
        if not isinstance(aval.dtype, np.dtype):
            return tuple(aval.shape)
        return tuple(self.sizes.get(n, n) if isinstance(n, int) else n for n in aval.shape)

    def padded_dims(self, x: PaddedValue, aval: Aval) -> frozenset[int]:
        """The dims in which a value is padded. aval: its type in the program as written."""
        shape = np.shape(x.array)
        return frozenset(d for d, n in enumerate(aval.shape) if shape[d] != n)

    def masked(self, x: PaddedValue, aval: Aval, dims: Collection[int], fill: Fill) -> PaddedValue:
        """The value with ``fill`` in the padding of these dims. No gradient flows out of the padding."""
        import jax
        import jax.numpy as jnp

        shape, keep = x.array.shape, None
        for d in sorted(dims):
            inside = jax.lax.iota(jnp.int32, shape[d]) < np.int32(aval.shape[d])
            here = jax.lax.broadcast_in_dim(inside, shape, (d,))
            keep = here if keep is None else jax.lax.bitwise_and(keep, here)
        if keep is None:
            return x
        array = jax.lax.select(keep, x.array, jax.lax.full(shape, fill, x.array.dtype))
        return PaddedValue(array, x.zero | frozenset(dims) if not fill else frozenset())

    def cut(self, x: PaddedValue, aval: Aval, dims: Collection[int]) -> PaddedValue:
        """The value without its padding in these dims."""
        import jax

        gone = self.padded_dims(x, aval) & frozenset(dims)
        if not gone:
            return x
        ends = [n if d in gone else x.array.shape[d] for d, n in enumerate(aval.shape)]
        return PaddedValue(jax.lax.slice(x.array, [0] * len(ends), ends), x.zero - gone)

    def widened(self, x: PaddedValue, aval: Aval) -> PaddedValue:
        """The value with zeros added wherever padding is missing."""
        import jax

        have, want = np.shape(x.array), self.wide(aval)
        if have == want:
            return x
        grown = frozenset(d for d, n in enumerate(have) if n != want[d])
        if any(have[d] != aval.shape[d] for d in grown):
            raise PaseError(
                f"a value of shape {tuple(aval.shape)} has the padded shape {have} instead of {want}; this is a bug in "
                f"pase.frontends.jax.padding.program",
                fix="report it",
            )
        ends = [(0, w - n, 0) for n, w in zip(have, want, strict=True)]
        if isinstance(x.array, np.ndarray):
            return PaddedValue(np.pad(x.array, [e[:2] for e in ends]), x.zero | grown)  # type: ignore[arg-type]
        array = jax.numpy.asarray(x.array)
        return PaddedValue(jax.lax.pad(array, np.zeros((), array.dtype), ends), x.zero | grown)

    def bind(self, eqn: Eqn, ins: Sequence[PaddedValue], **params: object) -> list[Array]:
        """Applies the equation's primitive to arrays of any size. params: parameters that differ."""
        outs = eqn.primitive.bind(*(x.array for x in ins), **{**eqn.params, **params})
        return list(outs) if eqn.primitive.multiple_results else [outs]

    def whole(self, eqn: Eqn, ins: Sequence[PaddedValue], info: DebugInfo) -> list[PaddedValue]:
        """Runs the equation as written, on unpadded values."""
        held = [self.cut(x, v.aval, range(v.aval.ndim)) for x, v in zip(ins, eqn.invars, strict=True)]
        outs = evaluate(eqn, [x.array for x in held], info)
        return [PaddedValue(x) for x in outs]

    def run(self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[PaddedValue]) -> list[PaddedValue]:
        """Runs the program. Its results are padded."""
        env: dict[Var, PaddedValue] = {}
        for v, x in (
            *zip(jaxpr.constvars, map(PaddedValue, consts), strict=True),
            *zip(jaxpr.invars, values, strict=True),
        ):
            env[v] = self.widened(x, v.aval)
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)

        def value(v: Var) -> PaddedValue:
            return PaddedValue(literal_array(v)) if is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            ins = [value(v) for v in eqn.invars]
            with written_as(eqn):
                outs = self._equation(eqn, ins, info)
                for v, x in zip(eqn.outvars, outs, strict=True):
                    env[v] = x if x.array is None else self.widened(x, v.aval)
        return [self.widened(value(v), v.aval) for v in jaxpr.outvars]

    def _equation(self, eqn: Eqn, ins: Sequence[PaddedValue], info: DebugInfo) -> Sequence[PaddedValue]:
        grows = any(self.wide(v.aval) != tuple(v.aval.shape) for v in eqn.outvars)
        if not grows and not any(self.padded_dims(x, v.aval) for x, v in zip(ins, eqn.invars, strict=True)):
            return [PaddedValue(x) for x in evaluate(eqn, [x.array for x in ins], info)]
        rule = PADDED.get(eqn.primitive.name)
        outs = None if rule is None else rule(self, eqn, ins)
        return self.whole(eqn, ins, info) if outs is None else outs
