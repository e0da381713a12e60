"""The input of the rules in ``rules``, which run one equation on one device, and the registry of these rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pase.frontends.jax.types import Eqn
from pase.local.types import Extents, LocalOp, LocalOperand, LocalResult
from pase.machine import Mesh
from pase.registry import Registry

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

    from pase.backends.jax.ops.draws import Examples
    from pase.frontends.jax.draws import BatchDraw
    from pase.frontends.jax.versions import DebugInfo

__all__ = ["MANUAL_RULES", "ManualCall", "NotLowered", "split_dims"]


class NotLowered(Exception):
    """An equation cannot run on parts; the message is the reason. It becomes a PaseError that names the equation."""


@dataclass(frozen=True, kw_only=True)
class ManualCall:
    """An equation as one op of the local program.

    devices: JAX's mesh. operands: for each input of the equation, the operand of the op; None for a literal. results:
    for each output, the result of the op; None if another op makes it. shapes: the local shapes of the outputs. draw:
    for random numbers of which this micro-batch has a part, the whole batch's, and this micro-batch's examples.
    """

    eqn: Eqn
    op: LocalOp
    mesh: Mesh
    devices: JaxMesh
    info: DebugInfo
    operands: tuple[LocalOperand | None, ...]
    results: tuple[LocalResult | None, ...]
    shapes: tuple[Extents | None, ...]
    draw: tuple[BatchDraw, Examples] | None = None

    @property
    def shape(self) -> Extents:
        """The local shape of the first result."""
        return next(s for s in self.shapes if s is not None)

    def whole(self, i: int = 0) -> Extents:
        """The unsharded shape of an input."""
        return tuple(self.eqn.invars[i].aval.shape)


Rule: TypeAlias = "Callable[[ManualCall, Sequence[Array]], Sequence[Array]]"

MANUAL_RULES: Registry[Rule] = Registry("local rule for JAX primitive")
"""Primitive -> how it runs on parts, if that differs from running it on the whole arrays."""


def split_dims(call: ManualCall, ins: Sequence[Array], i: int = 0) -> set[int]:
    """The dims of an input that are split, so that this device has only a part of them."""
    return {d for d, (n, whole) in enumerate(zip(ins[i].shape, call.whole(i), strict=True)) if n != whole}
