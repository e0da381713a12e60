"""DeFT's Preserver: decides whether a sequence of merged batches reaches about the loss of the plain sequence.

Training is modelled as a Gaussian walk with rebound at the lowest loss (Yin et al., KDD 2017; DeFT section IV.C). The
DeFT paper prints the expected next state with eta * delta_s, but eta * mu is meant. This module uses the corrected
form, which a Monte Carlo test confirms (tests/schedule/test_preserver.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pase.errors import PaseError

__all__ = ["TrainingState", "Verdict", "expected_loss", "expected_next", "judge"]


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of training, with the paper's symbols.

    loss: s. lowest: S*. lr: eta. mean: mu, the squared norm of the gradient. spread: sigma. batch: B.
    lr_scaling: whether a merge of k batches steps with k times the learning rate. DeFT's Table V needs this (its merged
        step falls by .0091, a plain one by .0045), and DeFT's code sums gradients, which is the same for SGD.

    The defaults are those of the table: the loss falls from .2103 to .1922 in 4 steps.
    """

    loss: float = 0.2103
    lowest: float = 0.0
    lr: float = 0.01
    mean: float = 0.4525
    spread: float = 1.0
    batch: int = 256
    lr_scaling: bool = True

    def __post_init__(self) -> None:
        if not self.loss > self.lowest or self.lr <= 0 or self.spread <= 0 or self.batch < 1:
            raise PaseError(
                f"loss={self.loss}, lowest={self.lowest}, lr={self.lr}, spread={self.spread}, batch={self.batch} "
                "is not a state of training",
                where="--loss",
                fix="give loss > lowest and positive lr, spread and batch",
            )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The Preserver's result. plain, planned: expected loss after the same iterations; ratio: plain / planned."""

    plain: float
    planned: float
    ratio: float
    passed: bool
    epsilon: float
    ratio_without_lr_scaling: float

    def __str__(self) -> str:
        word = "passes" if self.passed else "FAILS"
        return (
            f"Preserver {word}: expected loss {self.planned:.4f} against {self.plain:.4f}, ratio {self.ratio:.4f} "
            f"(allowed 1 ± {self.epsilon:g}; {self.ratio_without_lr_scaling:.4f} if the learning rate is not scaled "
            f"with merged batches)"
        )


def _phi(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def expected_next(walk: TrainingState, batches: int = 1) -> float:
    """E[s'] after one step on this many merged batches: |N(s - S* - eta mu, (eta sigma)^2 / B)| + S*."""
    lr = walk.lr * (batches if walk.lr_scaling else 1)
    gap = walk.loss - walk.lowest - lr * walk.mean
    noise = lr * walk.spread / math.sqrt(walk.batch * batches)
    a = gap / noise
    return (
        gap * (_phi(a) - _phi(-a)) + noise * math.sqrt(2.0 / math.pi) * math.exp(-a * a / 2.0) + walk.lowest
    )


def expected_loss(walk: TrainingState, batches: Sequence[int]) -> float:
    """The expected loss after one update for each entry of batches, which merges that many batches."""
    for k in batches:
        walk = replace(walk, loss=max(expected_next(walk, k), walk.lowest + 1e-12))
    return walk.loss


def judge(walk: TrainingState, batches: Sequence[int], *, epsilon: float = 0.01) -> Verdict:
    """Compare the sequence of merges with the same number of plain iterations. It passes if the ratio is in
    1 ± epsilon."""
    plain = expected_loss(walk, [1] * sum(batches))
    planned = expected_loss(walk, batches)
    unscaled = replace(walk, lr_scaling=False)
    other = expected_loss(unscaled, [1] * sum(batches)) / expected_loss(unscaled, batches)
    ratio = plain / planned
    return Verdict(
        plain=plain,
        planned=planned,
        ratio=ratio,
        passed=abs(ratio - 1.0) <= epsilon,
        epsilon=epsilon,
        ratio_without_lr_scaling=other,
    )
