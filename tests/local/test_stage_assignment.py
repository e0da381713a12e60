"""Segments are assigned to stages: each to the first stage that is not before its block's or its operands'."""

import numpy as np
import pytest

from pase.local.stage_assignment import PinnedSegment, SegmentedProgram, pinned


def chain_of(rng, blocks):
    """Random segments: each reads earlier values, weights or parts of the batch, and makes one value."""
    made = ["w0", "w1", "x0", "x1"]
    out = []
    for block in sorted(int(b) for b in rng.integers(-1, blocks + 1, 12)):
        reads = {str(v) for v in rng.choice(made, size=int(rng.integers(1, 4)))}
        made.append(f"v{len(made)}")
        out.append(PinnedSegment(reads, {made[-1]}, block))
    return out


def depends_on(segments, roots):
    """The values that depend on any of the roots, by a fixed point."""
    found = set(roots)
    while True:
        more = found | {v for s in segments if found & set(s.reads) for v in s.makes}
        if more == found:
            return found
        found = more


@pytest.mark.parametrize("seed", range(20))
def test_each_activation_is_on_the_first_stage_that_has_its_operands(seed):
    rng = np.random.default_rng(seed)
    cuts = [int(c) for c in rng.integers(1, 4, int(rng.integers(1, 4)))]
    segments = chain_of(rng, sum(cuts))
    found = pinned(enumerate(segments), {"w0", "w1"}, {"x0", "x1"}, cuts)
    trained, given = depends_on(segments, {"w0", "w1"}), depends_on(segments, {"x0", "x1"})
    assert set(found) == {
        k for k, s in enumerate(segments) if set(s.reads) & trained and set(s.reads) & given
    }
    made_in = {v: found[k] for k, s in enumerate(segments) if k in found for v in s.makes}
    ends = np.cumsum(cuts)
    for k, stage in found.items():
        block = min(max(segments[k].block, 0), sum(cuts) - 1)
        own = next(i for i, end in enumerate(ends) if block < end)
        assert stage == max([own, *(made_in[v] for v in segments[k].reads if v in made_in)])


@pytest.mark.parametrize("seed", range(20))
def test_stages_have_what_they_read_and_send_only_what_is_read_later(seed):
    rng = np.random.default_rng(seed)
    cuts = [int(c) for c in rng.integers(1, 4, int(rng.integers(1, 4)))]
    segments = dict(enumerate(chain_of(rng, sum(cuts))))
    weights, batch, result = {"w0", "w1"}, {"x0", "x1"}, segments[11].makes
    cut = SegmentedProgram(segments=segments, weights=weights, batch=batch, cuts=cuts, returned=result)
    stages = cut.stages()
    activations = depends_on(segments.values(), weights) & depends_on(segments.values(), batch)
    sent = set()
    for k, stage in enumerate(stages):
        assert set(stage.enters) == sent and set(stage.given) <= weights | batch
        have = {*stage.enters, *stage.given}
        for i in stage.segments:
            assert set(segments[i].reads) <= have and not set(segments[i].makes) & have
            have |= set(segments[i].makes)
        mine = {i for i in stage.segments if cut.pinned.get(i) == k}
        assert (
            mine == {i for i in cut.pinned if cut.pinned[i] == k} and set(stage.leaves) <= have & activations
        )
        sent = set(stage.leaves)
        later = [set(segments[i].reads) for i in cut.pinned if cut.pinned[i] > k]
        assert sent <= set().union(*later, result)
    assert not sent and set(result) <= have
    every = [i for s in stages for i in s.segments]
    assert all(every.count(i) == 1 for i in cut.pinned)
