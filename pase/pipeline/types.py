"""The data types of pipelines: schedules, as an ordered list of actions for each rank, and the times of stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

__all__ = ["Action", "Kind", "Schedule", "StageTimes"]


class Kind(IntEnum):
    """What a stage does with a micro-batch. BACKWARD is INPUT and WEIGHT together."""

    FORWARD = 0
    BACKWARD = 1
    INPUT = 2
    """The gradients of the stage's inputs, for which the previous stage waits."""
    WEIGHT = 3
    """The gradients of the stage's weights, for which only the end of the step waits."""


class Action(NamedTuple):
    """One stage's work on one micro-batch. It prints in the format of ``torch.distributed.pipelining``.

    >>> str(Action(2, Kind.INPUT, 5))
    '2I5'
    """

    stage: int
    kind: Kind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{'FBIW'[self.kind]}{self.micro}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The actions of each rank, in order.

    rank_of: stage -> rank; several stages on one rank are its chunks. orders: for each rank, its actions from first to
    last. lockstep: all ranks start each slot together, as in a single program that ends each loop iteration with a
    permutation of activations. Idle slots then take as long as busy ones.
    """

    name: str
    micro_batches: int
    rank_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    lockstep: bool = False

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed separately from activation gradients."""
        return any(a.kind is Kind.WEIGHT for a in self.orders[0])

    def __str__(self) -> str:
        """One line per rank, in the format that PyTorch's ``_PipelineScheduleRuntime._load_csv`` reads."""
        return "\n".join(",".join(map(str, order)) for order in self.orders)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of each stage for one micro-batch, float64 [stages], and of each rank once per step, float64 [ranks].

    input, weight: the two parts of backward. recompute: recomputation before a backward or its INPUT part. send: the
    transfers of activations to the next stage and of their gradients back, if it is on another rank, float64 [2,
    stages - 1]. before, after: the seconds of a rank before its first action (hoisted all-gathers of weights) and after
    its last action (gradient reductions, update).
    """

    forward: np.ndarray
    input: np.ndarray
    weight: np.ndarray
    recompute: np.ndarray
    send: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @classmethod
    def of(
        cls,
        forward: object,
        input: object,
        weight: object,
        *,
        ranks: int,
        recompute: object = 0.0,
        send: object = 0.0,
        before: object = 0.0,
        after: object = 0.0,
    ) -> StageTimes:
        """Make times from sequences or single numbers. The number of stages is the length of the longest sequence.

        send: one number for each cut, if gradients take as long as activations.

        >>> StageTimes.of([1, 2], 1.0, 0.0, ranks=2).full.tolist()
        [2.0, 3.0]
        """
        per_stage = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, float)) for x in (forward, input, weight, recompute))
        )
        f, i, w, a = per_stage
        return cls(
            forward=f,
            input=i,
            weight=w,
            recompute=a,
            send=np.broadcast_to(np.asarray(send, float), (2, f.size - 1)),
            before=np.broadcast_to(np.asarray(before, float), (ranks,)),
            after=np.broadcast_to(np.asarray(after, float), (ranks,)),
        )

    @cached_property
    def by_kind(self) -> np.ndarray:
        """Seconds by kind of action, float64 [kinds, stages]."""
        first = self.recompute + self.input
        return np.stack([self.forward, first + self.weight, first, self.weight])

    @property
    def full(self) -> np.ndarray:
        """The total seconds of each stage for one micro-batch, float64 [stages]."""
        out: np.ndarray = self.forward + self.recompute + self.input + self.weight
        return out
