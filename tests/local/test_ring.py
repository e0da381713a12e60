"""Ring attention in numpy on all devices at once, against attention to all positions by its definition."""

from dataclasses import dataclass

import numpy as np
import pytest

from pase.local.ring import Attended, RingAttention, merged
from pase.local.simulate import AllDevices, part_of, whole_of
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

HEADS, WIDTH, SCALE = 2, 3, 0.4


@dataclass(frozen=True)
class Definition:
    """Attention on arrays [..., heads, positions, width]. log: (queries, keys, causal) of each call."""

    log: list[tuple[int, int, bool]]

    def _weights(self, q, k, sums, causal):
        scores = q @ np.swapaxes(k, -1, -2) * SCALE
        if causal:
            scores = np.where(np.tri(q.shape[-2], k.shape[-2], dtype=bool), scores, -np.inf)
        if sums is None:
            sums = np.log(np.exp(scores).sum(-1))
        return np.exp(scores - sums[..., None]), sums

    def forward(self, q, k, v, *, causal, scale):
        assert scale == SCALE
        self.log.append((q.shape[-2], k.shape[-2], causal))
        weights, sums = self._weights(q, k, None, causal)
        return weights @ v, sums

    def backward(self, done, gradient, *, causal, scale):
        assert scale == SCALE
        q, k, v, result, sums = done
        weights, _ = self._weights(q, k, sums, causal)
        each = (gradient * result).sum(-1, keepdims=True)
        of_scores = weights * (gradient @ np.swapaxes(v, -1, -2) - each) * SCALE
        return of_scores @ k, np.swapaxes(of_scores, -1, -2) @ q, np.swapaxes(weights, -1, -2) @ gradient


def by_definition(q, k, v, g, causal):
    """The result and the gradients of queries, keys and values, unsplit."""
    kernel = Definition([])
    result, sums = kernel.forward(q, k, v, causal=causal, scale=SCALE)
    done = Attended(q, k, v, result, sums)
    return result, *kernel.backward(done, g, causal=causal, scale=SCALE)


def drawn(queries, keys):
    """Queries, keys, values, and the gradient of the result."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(HEADS, n, WIDTH)) for n in (queries, keys, keys, queries)]


MESHES = [
    *(Mesh(names=("heads", "ring"), sizes=(1, n)) for n in (2, 3, 4, 5)),
    Mesh(names=("ring", "heads"), sizes=(3, 2)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.sizes)))
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(4, 4, True), (3, 3, True), (4, 2, False), (3, 3, False)]
)
def test_a_ring_attends_to_all_positions(mesh, queries, keys, causal):
    """An even number of positions on each device is redistributed under a causal mask, an odd number is not."""
    ring, devices = mesh.by_name["ring"], AllDevices(mesh=mesh)
    by_axis = {"heads": (0, mesh.by_name["heads"]), "ring": (1, ring)}
    layout = AxisLayout([by_axis[n] if mesh.by_name[n] > 1 else None for n in mesh.names])
    q, k, v, g = drawn(queries * ring, keys * ring)
    kernel = Definition([])
    run = RingAttention(
        arrays=devices, kernel=kernel, axes=("ring",), causal=causal, scale=SCALE, positions=1
    )

    def split(x):
        return devices.each(lambda at: part_of(x, layout, at, mesh))

    result, residuals = run.forward(*map(split, (q, k, v)))
    made = result, *run.backward(*residuals, result, split(g))
    for x, want in zip(made, by_definition(q, k, v, g, causal), strict=True):
        np.testing.assert_allclose(whole_of(x, want.shape, layout, mesh), want, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_redistributed_positions_have_half_of_the_work_in_every_round(n):
    kernel, mesh = Definition([]), Mesh(names=("ring",), sizes=(n,))
    run = RingAttention(
        arrays=AllDevices(mesh=mesh), kernel=kernel, axes=("ring",), causal=True, scale=SCALE, positions=1
    )
    run.forward(*np.random.default_rng(1).normal(size=(3, n, HEADS, 8, WIDTH)))
    assert kernel.log == [(8, 8, True), *[(8, 4, False), (4, 8, False)] * (n - 1)]


def test_attention_to_two_sets_of_keys_is_that_to_both():
    q, k, v, _ = drawn(4, 6)
    kernel = Definition([])
    some, others = (
        kernel.forward(q, k[:, own], v[:, own], causal=False, scale=SCALE) for own in (slice(2), slice(2, 6))
    )
    want = kernel.forward(q, k, v, causal=False, scale=SCALE)
    for x, y in zip(merged(some, others, AllDevices(mesh=Mesh(names=(), sizes=()))), want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
