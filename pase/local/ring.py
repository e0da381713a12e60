"""Ring attention: keys and values travel around the devices that share the positions, in any framework
(``pase.local.arrays``).

In each round, a device attends to the keys that it has just received, and merges the results by their sums of
exponentials (Liu et al. 2023, arXiv 2310.01889). In backward, the gradients of keys and values travel with them, at
least in float32, and return to their device at the end.

Each device has a part of the positions, the same for queries and keys. Under a causal mask, contiguous parts have
unequal work: the last device has nearly twice the mean. So the positions are redistributed first: of 2n chunks, device
i of n gets chunks i and 2n-1-i (Llama 3, section 3.3.2). Arrays in this order are called *dealt*. Half of each pair of
parts is then masked. Results are put back into the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from pase.local.arrays import Arrays
from pase.pytree import Tree

__all__ = ["Attended", "AttentionFunctions", "RingAttention", "merged"]

A = TypeVar("A")

AttentionVisit: TypeAlias = Callable[[Sequence[A], Sequence[A], Sequence[A], bool], Sequence[A]]
"""(the state of some queries, which is empty at first, other arrays of these queries, keys and values, whether the mask
is causal) -> the next state, and in backward the gradients of these keys and values"""


class Attended(NamedTuple, Generic[A]):
    """The inputs and results of forward. sums: the logarithms of the queries' sums of exponentials."""

    q: A
    k: A
    v: A
    result: A
    sums: A


class AttentionFunctions(Protocol[A]):
    """The forward and backward functions of a kernel.

    causal: query i sees the keys up to the i-th. scale: the factor of the scores.
    """

    def forward(self, q: A, k: A, v: A, *, causal: bool, scale: float) -> tuple[A, A]:
        """(result, logarithms of the sums, which are at least in float32)"""
        ...

    def backward(self, done: Attended[A], gradient: A, *, causal: bool, scale: float) -> tuple[A, A, A]:
        """The gradients of q, k and v. gradient: that of the result."""
        ...


def merged(one: Sequence[A], other: Sequence[A], arrays: Arrays[A]) -> tuple[A, A]:
    """(result, logarithms of the sums) of attention to two sets of keys, from those to each set."""
    a, of_a = one
    b, of_b = other
    sums: A = arrays.library.logaddexp(of_a, of_b)

    def weighted(result: Tree, own: Tree) -> Tree:
        return result * arrays.library.exp(own - sums)[..., None]

    return arrays.cast(weighted(a, of_a) + weighted(b, of_b), a), sums


@dataclass(frozen=True, kw_only=True)
class RingAttention(Generic[A]):
    """Attention on the devices of a ring, each with its part of the queries, the keys and the values.

    axes: the mesh axes that split the positions, major to minor. scale: the factor of the scores. positions: the dim of
    the positions, in all arrays that the kernel takes and returns.
    """

    arrays: Arrays[A]
    kernel: AttentionFunctions[A]
    axes: tuple[str, ...]
    causal: bool
    scale: float
    positions: int

    def forward(self, q: A, k: A, v: A) -> tuple[A, tuple[A, A, A, A]]:
        """(the result, the residuals for backward: queries, keys, values, and logarithms of the sums)"""
        deals = self._deals(k)
        if deals:
            q, k, v = self._dealt([q, k, v])

        def visit(before: Sequence[A], queries: Sequence[A], keys: Sequence[A], causal: bool) -> Sequence[A]:
            k, v = keys
            result, sums = self.kernel.forward(queries[0], k, v, causal=causal, scale=self.scale)
            made = self.arrays.cast(result, sums), sums
            return merged(before, made, self.arrays) if before else made

        (result, sums), _ = self._around((q,), (k, v), 2, visit)
        result = self.arrays.cast(result, q)
        return (self._undealt([result])[0] if deals else result), (q, k, v, sums)

    def backward(self, q: A, k: A, v: A, sums: A, result: A, gradient: A) -> tuple[A, A, A]:
        """The gradients of queries, keys and values. q, k, v and sums are the residuals that ``forward`` returns."""
        deals = self._deals(k)
        if deals:
            result, gradient = self._dealt([result, gradient])

        def visit(
            total: Sequence[Tree], by_query: Sequence[A], keys: Sequence[A], causal: bool
        ) -> Sequence[A]:
            (q, result, sums, gradient), (k, v) = by_query, keys
            done = Attended(q, k, v, result, sums)
            made = self.kernel.backward(done, gradient, causal=causal, scale=self.scale)
            more, *of_keys = (self.arrays.cast(x, sums) for x in made)
            return [total[0] + more if total else more, *of_keys]

        (dq,), (dk, dv) = self._around((q, result, sums, gradient), (k, v), 1, visit, collects=True)
        made = [self.arrays.cast(x, like) for x, like in ((dq, q), (dk, k), (dv, v))]
        dq, dk, dv = self._undealt(made) if deals else made
        return dq, dk, dv

    def _around(
        self,
        by_query: Sequence[A],
        keys: Sequence[A],
        count: int,
        visit: AttentionVisit[A],
        collects: bool = False,
    ) -> tuple[Sequence[A], Sequence[A]]:
        """(the state of the queries, the gradients of keys and values) after all rounds. In each, ``visit`` gets the
        queries that attend to any of the round's keys, and the keys that they attend to.

        by_query: other arrays of the queries. count: the arrays of the state. collects: whether it is backward.
        """
        arrays, dim, deals = self.arrays, self.positions, self._deals(keys[0])

        def turn(t: A | int, keys: Sequence[A], state: Sequence[A]) -> Sequence[A]:
            def all_keys() -> Sequence[A]:
                return visit(state, by_query, keys, False)

            def no_keys() -> Sequence[A]:
                zeros = map(arrays.library.zeros_like, keys if collects else ())
                return [*state, *(arrays.cast(x, state[0]) for x in zeros)]

            def first_keys() -> Sequence[A]:
                """The first chunk of a lower device's keys is before all queries, the second chunk is after them."""
                first, second = self._chunks(keys)
                made, rows = visit(state, by_query, first, False), arrays.shape(second[0])[dim]
                return [*made[:count], *(arrays.padded(x, dim, 0, rows) for x in made[count:])]

            def last_queries() -> Sequence[A]:
                """The keys of a higher device are between the two chunks of queries."""
                done, last = self._chunks(state)
                made = visit(last, self._chunks(by_query)[1], keys, False)
                both = zip(done, made[:count], strict=True)
                return [*(arrays.concat(pair, dim) for pair in both), *made[count:]]

            if not state:
                return visit(state, by_query, keys, self.causal)
            if not self.causal:
                return all_keys()
            number: Tree = arrays.number(self.axes)
            lower, higher = (first_keys, last_queries) if deals else (all_keys, no_keys)
            return arrays.either(number >= t, lower, higher)

        return arrays.around(self.axes, keys, count, turn)

    # The redistribution of positions under a causal mask.

    def _deals(self, x: A) -> bool:
        """Whether positions are redistributed, which needs two equal chunks on each device."""
        return self.causal and self.arrays.shape(x)[self.positions] % 2 == 0

    def _chunk_owners(self, odd: int) -> list[tuple[int, int]]:
        """(source, target) of each device's even chunk (odd = 0) or odd chunk (odd = 1)."""
        n = self.arrays.ways(self.axes)
        chunks = [2 * i + odd for i in range(n)]
        return [(i, min(c, 2 * n - 1 - c)) for i, c in enumerate(chunks)]

    def _dealt(self, xs: Sequence[A]) -> list[A]:
        """Device i gives chunks 2i and 2i + 1 and gets chunks i and 2n - 1 - i."""
        even, odd = (
            self.arrays.permute_all(chunks, self.axes, self._chunk_owners(i))
            for i, chunks in enumerate(self._chunks(xs))
        )
        return [self._ordered(*pair) for pair in zip(even, odd, strict=True)]

    def _undealt(self, xs: Sequence[A]) -> list[A]:
        """The inverse of ``_dealt``."""
        ordered = [self._ordered(*pair) for pair in zip(*self._chunks(xs), strict=True)]
        even, odd = (
            self.arrays.permute_all(chunks, self.axes, [(b, a) for a, b in self._chunk_owners(i)])
            for i, chunks in enumerate(self._chunks(ordered))
        )
        return [self.arrays.concat(pair, self.positions) for pair in zip(even, odd, strict=True)]

    def _chunks(self, xs: Sequence[A]) -> tuple[list[A], list[A]]:
        """The first halves of the positions, and the second halves."""
        n = self.arrays.shape(xs[0])[self.positions] // 2
        first, second = ([self.arrays.narrow(x, self.positions, at, n) for x in xs] for at in (0, n))
        return first, second

    def _ordered(self, one: A, other: A) -> A:
        """(one, other) on even devices, (other, one) on odd devices.

        This converts between (even chunk, odd chunk) and the order of positions, (chunk i, chunk 2n-1-i): on an odd
        device i, the even chunk is the later one.
        """
        number: Tree = self.arrays.number(self.axes)
        even, selected = number % 2 == 0, self.arrays.selected
        pair = [selected(even, lambda: one, lambda: other), selected(even, lambda: other, lambda: one)]
        return self.arrays.concat(pair, self.positions)
