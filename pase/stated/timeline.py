"""Seconds of a step, from the seconds of its parts and what overlaps. It has only formulas, no graph and no machine.

A pass runs its units in order: what comes before the blocks, the blocks, what comes after them. While a unit computes,
the next unit's weights may be gathered and the previous unit's gradients summed. The unit then takes the longer of the
two, and its compute is slowed by the fraction of the device that the collectives occupy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pase.stated.strategy import ScheduleName

__all__ = ["Pipeline", "Unit", "passes", "pipelined", "slowed", "stage_layers"]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One part of a pass.

    compute_s: all work of the device.
    sent_s: collectives that overlap with nothing.
    gather_s: the gather of its weights; 0 if they are not gathered in this pass.
    sum_s: the sum of its gradients; 0 if they are not summed in this pass.
    """

    compute_s: float
    sent_s: float = 0.0
    gather_s: float = 0.0
    sum_s: float = 0.0


def slowed(compute_s: float, collectives_s: float, slow: float) -> float:
    """Return the seconds of compute beside collectives. slow: the fraction of the device that they occupy.

    >>> slowed(1.0, 0.0, 0.2), slowed(1.0, 0.5, 0.2), slowed(1.0, 3.0, 0.2)
    (1.0, 1.1, 1.25)
    """
    return compute_s + slow * min(collectives_s, compute_s / (1 - slow))


def passes(
    units: Sequence[Unit], slow: float, *, prefetches: bool, sums_overlap: bool, sums_queue: bool = False
) -> tuple[float, float]:
    """Return (seconds of a pass over the units in order, the part that collectives of weights and gradients add).

    The first unit's gather and the last unit's sum overlap with nothing. A sum ends before the unit after next begins;
    if ``sums_queue``, sums only wait for each other.

    >>> units = [Unit(compute_s=1.0, sum_s=1.5), Unit(compute_s=1.0), Unit(compute_s=1.0)]
    >>> [passes(units, 0.0, prefetches=True, sums_overlap=True, sums_queue=q)[0] for q in (False, True)]
    [3.5, 3.0]
    """
    total, alone = 0.0, sum(u.compute_s + u.sent_s for u in units)
    waiting = 0.0
    if prefetches:
        total += units[0].gather_s
    for i, u in enumerate(units):
        after = units[i + 1].gather_s if prefetches and i + 1 < len(units) else 0.0
        waiting += units[i - 1].sum_s if sums_overlap and i else 0.0
        awaited = after if sums_queue else after + waiting
        span = max(slowed(u.compute_s, after + waiting, slow) + u.sent_s, awaited)
        waiting = max(after + waiting - span, 0.0)
        total += span + (0.0 if prefetches else u.gather_s) + (0.0 if sums_overlap else u.sum_s)
    if sums_overlap:
        total += waiting + units[-1].sum_s
    return total, total - alone


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipelined step.

    step_s: seconds without gradient sums and update.
    bubble: the fraction of it in which the slowest stage is idle.
    in_flight: the number of micro-batches whose activations of a stage the first rank holds.
    in_flight_last: the same of the last rank, which forwards a chunk of several before it runs the first one backward.
    """

    step_s: float
    bubble: float
    in_flight: float
    in_flight_last: float


def pipelined(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    chunks: int,
    send_s: float,
    schedule: ScheduleName,
    *,
    sends_overlap: bool,
) -> Pipeline:
    """Return the step of a pipeline of unequal stages.

    For 1F1B and GPipe, it is the larger of two lower bounds of any such order, within 0.5% of a simulation on average.
    The first is the sum of the stages before j, then all work of stage j. The second is the first micro-batch's path
    through all stages, with the others at stage j, where min(m, p - j) forwards fill its wait. For the interleaved
    schedule (Narayanan et al. 2021, section 2.2.2), it is all work of the slowest stage, and one chunk of each other
    stage to reach it. Transfers count at fill and drain if they overlap with compute, and otherwise at every
    micro-batch as well.

    forward_s, backward_s: seconds of each stage for one micro-batch, all its chunks.
    send_s: seconds of one transfer.
    """
    p, m = len(forward_s), micro_batches
    t = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    if schedule == "interleaved":
        step = max(m * t[j] + (sum(t) - t[j]) / chunks for j in range(p))
        sends = 2 * send_s * (p * chunks - 1)
        steady = 0.0 if sends_overlap else 2 * send_s * m * chunks
        held = p * (1 + (p - 1) / (p * chunks))
        held_last = ((chunks - 1) * p + 1) / chunks
    else:
        held = float(m if schedule == "gpipe" else min(m, p))
        held_last = float(m if schedule == "gpipe" else 1)
        one = max(sum(t[:j]) + m * t[j] for j in range(p))
        two = sum(t) + max(
            (m - 1) * t[j] - ((m if schedule == "gpipe" else min(m, p - j)) - 1) * forward_s[j]
            for j in range(p)
        )
        step = max(one, two)
        sends = 2 * send_s * (p - 1)
        steady = 0.0 if sends_overlap or schedule == "gpipe" else 2 * send_s * max((p - 1) * m / p - 1, 0.0)
    total = step + sends + steady
    return Pipeline(
        step_s=total,
        bubble=1 - m * max(t) / total,
        in_flight=min(held, float(m)),
        in_flight_last=min(held_last, float(m)),
    )


def stage_layers(blocks: int, stages: int, ends: tuple[int, int] = (0, 0), before: int = 0) -> list[int]:
    """Return the number of blocks of each stage.

    It is equal if the stages divide the blocks. Otherwise embedding and loss count as a block each, as in Llama-3 and
    Megatron's account options. If that does not divide either, the last stages have one block fewer.

    ends: the numbers of blocks that embedding and output always count as. The first stages then have one block more if
        necessary.
    before: other layers of the first stage, which count as a block each.

    >>> stage_layers(32, 4), stage_layers(126, 8), stage_layers(61, 16)[-4:]
    ([8, 8, 8, 8], [15, 16, 16, 16, 16, 16, 16, 15], [4, 3, 3, 3])
    >>> stage_layers(80, 8, (1, 2))
    [10, 11, 11, 10, 10, 10, 10, 8]
    >>> stage_layers(58, 16, before=3)[:2], stage_layers(3, 2, before=1)
    ([1, 4], [1, 2])
    """
    if before:
        first, *rest = stage_layers(blocks + before, stages, ends)
        return [first - before, *rest] if first >= before else stage_layers(blocks, stages, ends)
    if any(ends):
        each, more = divmod(blocks + sum(ends), stages)
        out = [each + (i < more) for i in range(stages)]
        return [out[0] - ends[0], *out[1:-1], out[-1] - ends[1]] if stages > 1 else [blocks]
    if blocks % stages == 0:
        return [blocks // stages] * stages
    if (blocks + 2) % stages == 0:
        each = (blocks + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    each, more = divmod(blocks, stages)
    return [each + (i < more) for i in range(stages)]
