"""The choice of ways and blocks, against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pase.compiler.stages.choice import choose_stages, even_stages
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.menu import FIRST, StageRole
from pase.compiler.stages.search import StageMenu
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes
from tests.compiler.stages.staged import HEAVY_END, SCANNED, tables_of


def test_the_choice_of_ways_and_blocks_is_the_one_with_the_least_busiest_rank():
    """Compared with every way and number of blocks of every stage, within each rank's bytes at every moment.

    With equal stages, each rank has the ways with the least work.
    """
    ways = [tables_of(SCANNED, 4, weights, again) for weights, again in (("hoisted", False), ("each", True))]
    for part, (name, chunks) in itertools.product((0.6, 0.8, 1.0), (("1f1b", 1), ("interleaved", 2))):
        most = part * ways[0].cheapest(FIRST, 4).nbytes(4, 2)
        menu, s = StageMenu(ways, 2, 4, most), schedule(name, 2, 4, chunks)
        roles = [StageRole(first=k == 0, last=k == s.stages - 1) for k in range(s.stages)]
        some = [[t.cheapest(r, 4, p / most, 2) for t in ways for p in (0.0, 0.3)] for r in roles]

        exact = dict[tuple[int, ...], float]()

        def least(rank, s=s, some=some, most=most, exact=exact):  # type: ignore[no-untyped-def]
            mine = [k for k, at in enumerate(s.rank_of) if at == rank]
            out: dict[int, float] = {}
            for counts in itertools.product(range(1, 8), repeat=len(mine)):
                for picked in itertools.product(*(some[k] for k in mine)):
                    kept, waiting = np.zeros(s.stages), np.zeros(s.stages)
                    held = max(w.buffers for w in picked)
                    for k, n, w in zip(mine, counts, picked, strict=True):
                        kept[k] = w.fixed(CostKind.KEPT) + n * w.of_block(CostKind.KEPT)
                        waiting[k] = w.fixed(CostKind.KEPT) + n * (w.block.inner or w.block[CostKind.KEPT])
                        held += w.fixed(CostKind.STATIC) + n * w.of_block(CostKind.STATIC)
                    seconds = sum(w.step_s(n, 4) for n, w in zip(counts, picked, strict=True))
                    if held + peak_bytes(s, kept, waiting)[rank] <= most:
                        out[sum(counts)] = min(out.get(sum(counts), np.inf), seconds)
                        exact[rank, *counts] = min(exact.get((rank, *counts), np.inf), seconds)
            return out

        one, other = least(0), least(1)
        for blocks, counts in (
            (8, [8 // s.stages] * s.stages),
            (7, [4, 3] if s.stages == 2 else [2, 2, 2, 1]),
        ):
            of = [(r, *(n for n, at in zip(counts, s.rank_of, strict=True) if at == r)) for r in (0, 1)]
            even = even_stages(s, some, blocks, menu.limits)
            assert (even is None) == any(x not in exact for x in of)
            if even is not None:
                assert even.counts.tolist() == counts
                busy = [w.step_s(n, 4) for w, n in zip(even.splits, counts, strict=True)]
                assert np.bincount(s.rank_of, busy) == pytest.approx([exact[x] for x in of])
        best = min((max(t, other[8 - n]) for n, t in one.items() if 8 - n in other), default=np.inf)
        found = choose_stages(s, some, menu.shares, 8, menu.limits)
        if found is None:
            assert np.isinf(best)
            continue
        assert found.counts.sum() == 8
        rank, seconds = (
            np.array(s.rank_of),
            [w.step_s(n, 4) for w, n in zip(found.splits, found.counts, strict=True)],
        )
        assert np.bincount(rank, seconds).max() == pytest.approx(best)
        rows, room = menu.problem(s, found.splits).memory_rows
        assert (rows @ found.counts <= room * (1 + 1e-9)).all()


@pytest.mark.parametrize(("ranks", "part"), [(2, np.inf), (2, 1.5), (3, np.inf)])
def test_a_rank_with_a_heavy_end_has_few_blocks(ranks, part):
    """Its share by blocks alone is far from the best number, which lies at the edge of what is tried around the share.

    Compared with every number of blocks of every rank.
    """
    t, blocks = tables_of(HEAVY_END, 4, "hoisted"), 12
    limit = part * t.cheapest(FIRST, blocks).nbytes(blocks, ranks)
    menu, s = StageMenu([t], ranks, 4, limit), schedule("1f1b", ranks, 4)
    some, best = menu.ways(s), (np.inf, ())
    for counts in itertools.product(range(1, blocks), repeat=ranks):
        if sum(counts) == blocks:
            for picked in itertools.product(*some):
                rows, room = menu.problem(s, picked).memory_rows
                if not len(rows) or (rows @ counts <= room).all():
                    each = [w.step_s(n, 4) for w, n in zip(picked, counts, strict=True)]
                    best = min(best, (max(each), counts))
    found = choose_stages(s, some, menu.shares, blocks, menu.limits)
    assert found is not None and found.counts.sum() == blocks
    busiest = max(w.step_s(n, 4) for w, n in zip(found.splits, found.counts, strict=True))
    assert busiest == pytest.approx(best[0], rel=1e-12)
    assert best[1][-1] < blocks // ranks - 2, "the end of this model is not heavy"
