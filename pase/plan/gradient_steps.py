"""What a check of gradients asks of a framework: a plan's steps along a line of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pase.plan.gradient_check import GradientDifference

__all__ = [
    "JITTER",
    "POINTS",
    "AlongLine",
    "Direction",
    "GradientSteps",
    "Line",
    "uphill_factors",
    "zero_scales",
]

POINTS = 9
"""Points of a line, its ends included."""

JITTER = 2.0**-6
"""The lines start this far (relative) from the given parameters: at zeros, such as of a head that is not trained yet,
gradients vanish that later do not."""

_ALL_ZEROS = 0.1
"""The scale of a parameter that is all zeros, such as a bias."""

Direction = Literal["random", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of parameters, from the point at which all lines start.

    random: each element moves by up to ``size`` times itself (zeros: times the parameter's root mean square, or 0.02 if
    it is all zeros). gradient: the parameter moves along its gradient, by ``size`` times its own norm. perturbed: which
    parameters; the others stay.
    """

    direction: Direction
    perturbed: tuple[int, ...]
    size: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class AlongLine:
    """What the steps at the points of a line returned.

    losses: float64 [points]. slopes: float64 [points, parameters], Re Σ g·D over the whole parameter; 0 where nothing
    moves. reach: float64 [parameters], the typical |slope| of a gradient's error as large as the gradient itself:
    |g|·|D|/√elements for a random direction, |g|·|D| along the gradient. loss_eps, slope_eps: the spacing of numbers
    above 1 in the loss's dtype, and in the coarsest dtype that the program computes in.
    """

    losses: np.ndarray
    slopes: np.ndarray
    reach: np.ndarray
    loss_eps: float
    slope_eps: float


class GradientSteps(Protocol):
    """A framework's steps of a plan."""

    @property
    def names(self) -> Sequence[str]:
        """The trained parameters."""
        ...

    @property
    def loss(self) -> float:
        """At the lines' first point."""
        ...

    @property
    def jittered(self) -> bool:
        """Whether the lines start a little away from the given parameters."""
        ...

    @property
    def count(self) -> int:
        """Steps that were run."""
        ...

    @property
    def coarsest(self) -> float:
        """The spacing of numbers above 1 in the coarsest dtype that the program computes in."""
        ...

    @property
    def copies(self) -> Sequence[GradientDifference]:
        """By parameter: how far the copies of its gradient on different devices are apart."""
        ...

    @property
    def gradient_noise(self) -> np.ndarray:
        """[parameters]: how much of the gradient changes when parameters are rounded differently, relative to it."""
        ...

    def along(self, line: Line) -> AlongLine:
        """Run the step at each point of a line. With several processes, each gets the same numbers."""
        ...


def zero_scales(squares: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """[parameters]: how far zeros move, relative to the size of a line. squares: Σ|x|² of each; elements: its size."""
    mean = squares / np.maximum(elements, 1)
    return np.where(mean > 0, np.sqrt(mean), _ALL_ZEROS)


def uphill_factors(
    size: float, squares: np.ndarray, elements: np.ndarray, gradient_norms: np.ndarray
) -> np.ndarray:
    """[parameters]: what a gradient is multiplied by, so that it is ``size`` times the parameter's own norm."""
    own = zero_scales(squares, elements) * np.sqrt(elements)
    return np.divide(size * own, gradient_norms, out=np.zeros_like(gradient_norms), where=gradient_norms > 0)
