"""What a check of gradients needs from a framework: a plan's steps along a line of parameters."""

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
"""The number of points of a line, including both ends."""

JITTER = 2.0**-6
"""The lines start this far (relative) from the given parameters. At zeros, such as those of an untrained head,
gradients vanish that do not vanish later."""

_ALL_ZEROS = 0.1
"""The scale of a parameter that is all zeros, such as a bias."""

Direction = Literal["random", "gradient"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of parameters, from the point at which all lines start.

    direction: if ``random``, each element moves by up to ``size`` times itself. A zero moves by ``size`` times the
        parameter's root mean square, or times 0.1 if the parameter is all zeros. If ``gradient``, the parameter moves
        along its gradient, by ``size`` times its own norm.
    perturbed: the parameters that move.
    """

    direction: Direction
    perturbed: tuple[int, ...]
    size: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class AlongLine:
    """What the steps at the points of a line returned.

    losses: float64 [points].
    slopes: float64 [points, parameters], Re Σ g·D over the whole parameter; 0 if the parameter does not move.
    reach: float64 [parameters], the typical |slope| of an error as large as the gradient itself: |g|·|D|/√elements for
        a random direction, |g|·|D| along the gradient.
    loss_eps, slope_eps: the spacing of numbers just above 1 in the loss's dtype, and in the coarsest dtype in which the
        program computes.
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
        """The names of the trained parameters."""
        ...

    @property
    def loss(self) -> float:
        """The loss at the first point of the lines."""
        ...

    @property
    def jittered(self) -> bool:
        """Whether the lines start a little away from the given parameters."""
        ...

    @property
    def count(self) -> int:
        """The number of steps that were run."""
        ...

    @property
    def coarsest(self) -> float:
        """The spacing of numbers just above 1 in the coarsest dtype in which the program computes."""
        ...

    @property
    def copies(self) -> Sequence[GradientDifference]:
        """Per parameter, how far the copies of its gradient on different devices are apart."""
        ...

    @property
    def gradient_noise(self) -> np.ndarray:
        """[parameters]: the relative change of the gradient if the parameters are rounded differently."""
        ...

    def along(self, line: Line) -> AlongLine:
        """Run the step at each point of a line. With several processes, each gets the same numbers."""
        ...


def zero_scales(squares: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Return [parameters]: how far zeros move, relative to the size of a line.

    squares: Σ|x|² of each parameter.
    elements: its number of elements.
    """
    mean = squares / np.maximum(elements, 1)
    return np.where(mean > 0, np.sqrt(mean), _ALL_ZEROS)


def uphill_factors(
    size: float, squares: np.ndarray, elements: np.ndarray, gradient_norms: np.ndarray
) -> np.ndarray:
    """Return [parameters]: the factor that makes a gradient's norm ``size`` times the parameter's own norm."""
    own = zero_scales(squares, elements) * np.sqrt(elements)
    return np.divide(size * own, gradient_norms, out=np.zeros_like(gradient_norms), where=gradient_norms > 0)
