"""Schedules with two stages per rank, placed along the ranks and back in a V: ZB-V and DualPipeV."""

from __future__ import annotations

from collections import deque

from pase.pipeline.registry import register, vee
from pase.pipeline.types import Action, Kind

F, B, INPUT, WEIGHT = Kind


class _Rank:
    """Writes one rank's list of actions. Each stage takes micro-batches in order for each kind of action."""

    def __init__(self, ranks: int, r: int) -> None:
        self.stage = (r, 2 * ranks - 1 - r)
        self.order: list[Action] = []
        self.count = {(c, k): 0 for c in (0, 1) for k in (F, INPUT, WEIGHT)}
        self.late: deque[Action] = deque()

    def do(self, chunk: int, *kinds: Kind) -> None:
        """Add actions of these kinds on the chunk's next micro-batches. A backward counts as both of its parts."""
        for kind in kinds:
            key = (chunk, INPUT if kind == B else kind)
            self.order.append(Action(self.stage[chunk], kind, self.count[key]))
            self.count[key] += 1
            if kind == B:
                self.count[chunk, WEIGHT] += 1
            elif kind == INPUT:
                self.late.append(Action(self.stage[chunk], WEIGHT, self.order[-1].micro))

    def weight(self) -> None:
        """Add the oldest weight gradient that is still to be computed, if there is one."""
        if self.late:
            self.order.append(self.late.popleft())


@register(
    "zb-v",
    "1F1B's memory on every rank; no bubble if forward and both parts of backward take equally long",
    source="Qi et al., NeurIPS 2024 (2405.15362); torch.distributed.pipelining, ScheduleZBVZeroBubble",
    chunks=(2, 2),
    placement=vee,
)
def zb_v(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [_zb_v_rank(ranks, r, micro_batches) for r in range(ranks)]


def _zb_v_rank(ranks: int, r: int, micro_batches: int) -> list[Action]:
    # The list is written for enough micro-batches to fill the pipeline. Actions on missing ones are dropped at the end.
    many = max(2 * ranks - 1, micro_batches)
    rank = _Rank(ranks, r)
    for _ in range(2 * (ranks - r) - 1):
        rank.do(0, F)
    for _ in range(r):
        rank.do(1, F)
        rank.do(0, F)
    for _ in range(ranks - r):
        rank.do(1, F, INPUT, WEIGHT)
    while rank.count[1, F] < rank.count[0, F] or rank.count[0, F] < many:
        if rank.count[0, F] < many:
            rank.do(0, F)
        rank.do(0, INPUT, WEIGHT)
        rank.do(1, F, INPUT, WEIGHT)
    for _ in range(r):
        rank.do(0, INPUT)
        rank.do(1, INPUT)
    for _ in range(ranks - r):
        rank.do(0, INPUT, WEIGHT)
    while rank.count[1, WEIGHT] < many:
        rank.do(1, WEIGHT)
    while rank.count[0, WEIGHT] < many:
        rank.do(0, WEIGHT)
    return [a for a in rank.order if a.micro < micro_batches]


@register(
    "dualpipev",
    "forwards of one of a rank's stages overlap with backwards of the other; stages placed in a V",
    source="deepseek-ai/DualPipe, dualpipe/dualpipev.py; torch.distributed.pipelining, ScheduleDualPipeV",
    chunks=(2, 2),
    placement=vee,
    least=2,
)
def dualpipev(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    return [_dualpipev_rank(ranks, r, micro_batches) for r in range(ranks)]


def _dualpipev_rank(ranks: int, r: int, micro_batches: int) -> list[Action]:
    """The eight steps of DualPipe's own program.

    A forward and a backward that DualPipe runs as one op are listed one after the other. How much time their overlap
    saves depends on the executor.
    """
    rank = _Rank(ranks, r)
    for _ in range(2 * (ranks - r - 1)):
        rank.do(0, F)
    for _ in range(r + 1):
        rank.do(0, F)
        rank.do(1, F)
    for _ in range(ranks - r - 1):
        rank.do(1, INPUT)
        rank.weight()
        rank.do(1, F)
    for _ in range(micro_batches - 2 * ranks + r + 1):
        rank.do(0, F)
        rank.do(1, B)
        rank.do(1, F)
        rank.do(0, B)
    for _ in range(ranks - r - 1):
        rank.do(1, B)
        rank.do(1, F)
        rank.do(0, B)
    apart = False
    for n in range(r + 1):
        middle = n == (r + 1) // 2
        apart |= middle and r % 2 == 1
        rank.do(1, INPUT if apart else B)
        apart |= middle and r % 2 == 0
        rank.do(0, INPUT if apart else B)
    for _ in range(ranks - r - 1):
        rank.weight()
        rank.do(0, INPUT if apart else B)
    while rank.late:
        rank.weight()
    return rank.order
