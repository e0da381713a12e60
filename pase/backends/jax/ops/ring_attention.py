"""Ring attention, on one device of the ring: keys and values circulate while attention runs on the local ones.

Each device has a part of the positions, the same for queries and keys. Under a causal mask, contiguous parts have
unequal work: the last device has nearly twice the mean. So the positions are redistributed first: of 2P chunks, device
i gets the i-th and the (2P-1-i)-th. Half of each pair of parts is then masked (Liu et al. 2023, arXiv 2310.01889;
Llama 3, section 3.3.2). In backward, the gradients of keys and values travel with them, in float32, and return to their
device at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pase.backends.jax.ops.attention_kernels import Attended, AttentionFunctions, merged

if TYPE_CHECKING:
    from jax import Array

__all__ = ["RingAttention"]

C = TypeVar("C")
Keys: TypeAlias = "tuple[Array, Array]"
Gradients: TypeAlias = "tuple[Array, Keys]"
"""Gradients of the queries, and of keys and values."""


@dataclass(frozen=True, kw_only=True)
class RingAttention:
    """Attention on one device of a ring, under ``shard_map``.

    axes: the mesh axes that form the ring. devices: how many devices the ring has. scale: the factor of the scores.
    """

    kernel: AttentionFunctions
    axes: tuple[str, ...]
    devices: int
    causal: bool
    scale: float

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
        """(result, residuals for backward)"""
        import jax.numpy as jnp

        deals = self._deals(q)
        if deals:
            q, k, v = (self._dealt(x) for x in (q, k, v))
        wide = jnp.promote_types(q.dtype, jnp.float32)

        def part(t: Array | int, keys: Keys) -> Keys:
            result, sums = self._part(t, q, keys)
            return result.astype(wide), sums

        def iteration(t: Array, carry: tuple[Keys, Keys]) -> tuple[Keys, Keys]:
            keys, done = carry
            return self._next(keys), merged(done, part(t, keys))

        first = self.kernel.forward(q, k, v, causal=self.causal, scale=self.scale)
        carry = (self._next((k, v)), (first[0].astype(wide), first[1]))
        keys, done = self._around(iteration, carry)
        result, sums = merged(done, part(self.devices - 1, keys))
        result = result.astype(q.dtype)
        return (self._undealt(result) if deals else result), (q, k, v, sums)

    def backward(
        self, q: Array, k: Array, v: Array, sums: Array, result: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values. q, k, v and sums are the residuals that ``forward`` returns."""
        import jax
        import jax.numpy as jnp

        deals = self._deals(q)
        if deals:
            result, gradient = self._dealt(result), self._dealt(gradient)
        given = (q, result, sums, gradient)
        wide = jnp.promote_types(q.dtype, jnp.float32)

        def part(t: Array | int, keys: Keys) -> Gradients:
            return jax.tree.map(lambda x: x.astype(wide), self._part_backward(t, given, keys))  # type: ignore[no-any-return]

        def iteration(t: Array, carry: tuple[Keys, Array, Keys]) -> tuple[Keys, Array, Keys]:
            keys, dq, arrived = carry
            more, of_keys = part(t, keys)
            return self._next(keys), dq + more, jax.tree.map(jnp.add, self._next(arrived), of_keys)

        done = Attended(q, k, v, result, sums)
        dq, *of_keys = self.kernel.backward(done, gradient, causal=self.causal, scale=self.scale)
        dk, dv = (x.astype(wide) for x in of_keys)
        keys, dq, sums_of_keys = self._around(iteration, (self._next((k, v)), dq.astype(wide), (dk, dv)))
        more, last = part(self.devices - 1, keys)
        dk, dv = self._next(jax.tree.map(jnp.add, self._next(sums_of_keys), last))
        out = ((dq + more).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))
        return tuple(self._undealt(x) for x in out) if deals else out  # type: ignore[return-value]

    def _around(self, iteration: Callable[[Array, C], C], carry: C) -> C:
        """Run all iterations between the first and the last."""
        import jax
        import jax.numpy as jnp

        return jax.lax.scan(lambda c, t: (iteration(t, c), None), carry, jnp.arange(1, self.devices - 1))[0]

    def _next(self, tree: C) -> C:
        """Send each device's part to the next device. In iteration t, device i holds the part of device i - t."""
        import jax

        n = self.devices
        return jax.tree.map(
            lambda x: jax.lax.ppermute(x, self.axes, [(i, (i + 1) % n) for i in range(n)]), tree
        )

    def _part(self, t: Array | int, q: Array, keys: Keys) -> Keys:
        """Attention over the keys of iteration t, which come from a device before or after this one."""
        import jax
        import jax.numpy as jnp

        k, v = keys

        def attend(q: Array, k: Array, v: Array) -> Keys:
            return self.kernel.forward(q, k, v, causal=False, scale=self.scale)

        if not self.causal:
            return attend(q, k, v)
        half = q.shape[1] // 2 if self._deals(q) else None

        def before() -> Keys:
            return attend(q, k[:, :half], v[:, :half])

        def behind() -> Keys:
            if half is None:
                return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), jnp.full(
                    q.shape[:-1], -jnp.inf, wide
                )
            result, sums = attend(q[:, half:], k, v)
            return _after(result, half), _after(sums, half, -jnp.inf)

        wide = jnp.promote_types(q.dtype, jnp.float32)
        return jax.lax.cond(jax.lax.axis_index(self.axes) >= t, before, behind)  # type: ignore[no-any-return]

    def _part_backward(self, t: Array | int, given: tuple[Array, ...], keys: Keys) -> Gradients:
        """The gradients from attention over the keys of iteration t. given: q, result, sums, gradient."""
        import jax
        import jax.numpy as jnp

        k, v = keys

        def pull(given: tuple[Array, ...], k: Array, v: Array) -> Gradients:
            q, result, sums, gradient = given
            done = Attended(q, k, v, result, sums)
            dq, dk, dv = self.kernel.backward(done, gradient, causal=False, scale=self.scale)
            return dq, (dk, dv)

        if not self.causal:
            return pull(given, k, v)
        half = k.shape[1] // 2 if self._deals(k) else None

        def before() -> Gradients:
            dq, of_keys = pull(given, k[:, :half], v[:, :half])
            return dq, of_keys if half is None else jax.tree.map(lambda x: _before(x, half), of_keys)

        def behind() -> Gradients:
            if half is None:
                return jax.tree.map(jnp.zeros_like, (given[0], (k, v)))  # type: ignore[no-any-return]
            dq, of_keys = pull(tuple(x[:, half:] for x in given), k, v)
            return _after(dq, half), of_keys

        return jax.lax.cond(jax.lax.axis_index(self.axes) >= t, before, behind)  # type: ignore[no-any-return]

    def _deals(self, x: Array) -> bool:
        return self.causal and x.shape[1] % 2 == 0

    def _chunk_owners(self, odd: int) -> list[tuple[int, int]]:
        """(source, target) for each device's even (or odd) chunk."""
        chunks = [2 * i + odd for i in range(self.devices)]
        return [(i, min(c, 2 * self.devices - 1 - c)) for i, c in enumerate(chunks)]

    def _dealt(self, x: Array) -> Array:
        """Redistribute chunks: device i gives the chunks 2i and 2i + 1 and gets the chunks i and 2P - 1 - i."""
        import jax
        import jax.numpy as jnp

        even, odd = (
            jax.lax.ppermute(chunk, self.axes, self._chunk_owners(i))
            for i, chunk in enumerate(jnp.split(x, 2, axis=1))
        )
        return self._ordered(even, odd)

    def _undealt(self, x: Array) -> Array:
        """The inverse of ``_dealt``."""
        import jax
        import jax.numpy as jnp

        even, odd = jnp.split(self._ordered(*jnp.split(x, 2, axis=1)), 2, axis=1)
        back = [
            jax.lax.ppermute(chunk, self.axes, [(b, a) for a, b in self._chunk_owners(i)])
            for i, chunk in enumerate((even, odd))
        ]
        return jnp.concatenate(back, axis=1)

    def _ordered(self, one: Array, other: Array) -> Array:
        """(one, other) on even devices, (other, one) on odd devices, because chunk i of an odd device i is odd."""
        import jax
        import jax.numpy as jnp

        even = jax.lax.axis_index(self.axes) % 2 == 0
        return jnp.concatenate([jnp.where(even, one, other), jnp.where(even, other, one)], axis=1)


def _after(x: Array, n: int, value: float = 0.0) -> Array:
    """x with n positions of ``value`` before it."""
    import jax.numpy as jnp

    return jnp.pad(x, ((0, 0), (n, 0), *((0, 0),) * (x.ndim - 2)), constant_values=value)


def _before(x: Array, n: int) -> Array:
    """x with n positions of zeros after it."""
    import jax.numpy as jnp

    return jnp.pad(x, ((0, 0), (0, n), *((0, 0),) * (x.ndim - 2)))
