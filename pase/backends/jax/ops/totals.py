"""Sums over the whole batch in the program of a micro-batch, such as the number of tokens that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import is_literal

if TYPE_CHECKING:
    from jax import Array

    from pase.ir.batch_sums import BatchSums

__all__ = ["Totals"]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a walk over the program of a micro-batch does about the sums over the whole batch (``BatchSums``).

    sums: which tensors they are. micro_batches: of the step. given: tensor -> the whole batch's total, as this program
    holds its own: a device of the manual lowering holds its share. None in a walk that finds the micro-batch's own.
    found: tensor -> the micro-batch's own. The walk adds them, also where totals are given.
    """

    sums: BatchSums
    micro_batches: int
    given: Mapping[str, Array] | None = None
    found: dict[str, Array] = field(default_factory=dict)

    @property
    def finds(self) -> bool:
        """Whether this walk only finds the micro-batch's own sums, so that nothing has to be recomputed."""
        return self.given is None

    def read(self, tensor: str | None, own: Array) -> Array:
        """What the readers of a tensor read. own: its value in this micro-batch."""
        if tensor is None or tensor not in self.sums.totals:
            return own
        self.found[tensor] = own
        return own if self.given is None else self.given[tensor]

    def operands(self, eqn: Eqn, made: Sequence[str], ins: Sequence[Array]) -> list[Array]:
        """The operands of an equation, each times its power of the number of micro-batches if the equation adds terms
        of different powers. made: the tensors that it writes."""
        powers = next((self.sums.scaled[t] for t in made if t in self.sums.scaled), None)
        if powers is None:
            return list(ins)
        terms = [i for i, v in enumerate(eqn.invars) if not is_literal(v)]
        out = list(ins)
        for i, power in zip(terms, powers, strict=True):
            out[i] = out[i] * self.micro_batches**power
        return out

    def own(self, tensor: str | None, read: Array) -> Array:
        """The micro-batch's own value of a result. read: what its readers read."""
        return self.found.get(tensor or "", read)

    def of_batch(self, shares: Mapping[str, Array]) -> dict[str, Array]:
        """Tensor -> the whole batch's total. shares: tensor -> the micro-batches' own, stacked."""
        return {t: _mean(x, self.micro_batches ** self.sums.totals[t]) for t, x in shares.items()}


def _mean(stacked: Array, by: float) -> Array:
    total = stacked.sum(0, dtype=stacked.dtype)
    return total if by == 1 else (total / by).astype(total.dtype)
