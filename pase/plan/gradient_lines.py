"""Computes a check of gradients: the loss along lines of parameters, compared with the integral of its gradient.

Along x(s) = p + s·D, 0 ≤ s ≤ 1, the loss changes by ∫⟨g(x(s)), D⟩ds. A step returns loss and gradient, so both sides
come from the same nine steps. A difference quotient needs short steps, for which the rounding of the loss hides most of
its change. An integral may cover a long line. A kink (relu, max) reduces the accuracy of the quadrature, which is
measured.

The allowed difference follows from the same nine points: the difference between Simpson's rule on all points and on
every second one, the scatter of the loss around a smooth curve (Student's t), and the spacing of the dtype in which the
program computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.files.progress import PieceOfWork
from pase.plan.gradient_check import (
    GradientCheck,
    GradientDifference,
    GradientReference,
    GradientVerdict,
    ParameterCheck,
)
from pase.plan.gradient_steps import POINTS, AlongLine, Direction, GradientSteps, Line

__all__ = [
    "CheckLines",
    "CheckedPlan",
    "LineResult",
    "OnLines",
    "Scatter",
    "gradient_check",
    "judged",
    "parameter_checks",
    "verdicts",
]

_RESOLUTION = 0.1
"""A line decides about a parameter if an error of this fraction of its gradient would show."""

_STUDENT_T = (13.6, 7.3, 6.1, 5.6, 5.3, 5.1, 5.0, 4.9, 4.9, 4.8)
"""Student's t for 6, 12, … degrees of freedom (each line has nine points minus a parabola's three). One line in 10^5
exceeds it without any error."""

_NOISE_ALONE = 0.1
"""A gradient that changes by more than this fraction if its inputs are rounded differently consists of rounding only.
The key bias of an attention is an example."""

_FIRST_SIZE: Mapping[str, float] = {"random": 2.0**-4, "gradient": 2.0**-6}
_LARGEST_SIZE = 0.5
_TRIES = 4
"""How often a line is made shorter or longer."""


@dataclass(frozen=True, kw_only=True)
class LineResult:
    """The judgment of a line.

    measured: the change of the loss.
    predicted: the integral of the gradient.
    quadrature, rounding, slope_rounding: the parts of their difference that are explained by the quadrature, by the
        rounding of losses, and by the rounding of gradients.
    """

    measured: float
    predicted: float
    quadrature: float
    rounding: float
    slope_rounding: float
    rough: bool
    """Whether the loss is less smooth along the line than rounding explains."""
    squares: float
    """The sum of squares of the losses after subtracting the integral and a fitted parabola."""

    @property
    def allowed(self) -> float:
        return self.quadrature + self.rounding + self.slope_rounding

    @property
    def disagrees(self) -> bool:
        return abs(self.measured - self.predicted) > self.allowed


@dataclass(kw_only=True)
class Scatter:
    """How far losses scatter around a smooth curve, learned from line to line: one sum of squares per line."""

    squares: list[float] = field(default_factory=list)

    def rough(self, mine: float, floor: float) -> bool:
        """Whether the loss itself is not smooth along a line, or too curved for nine points.

        Such a line scatters much more than the previous ones.
        """
        if not self.squares:
            return False
        dof = POINTS - 3
        pooled = math.sqrt(math.fsum(self.squares) / (dof * len(self.squares)))
        return math.sqrt(mine / dof) > 10 * max(pooled, floor)

    def allowed(self, mine: float, floor: float) -> float:
        """Return the difference of two losses of a line that rounding explains.

        A line that scatters much more than the others is judged by itself.

        mine: this line's sum of squares.
        floor: the least standard deviation.
        """
        dof = POINTS - 3
        alone = math.sqrt(mine / dof)
        bound = _STUDENT_T[0] * max(alone, floor)
        if self.squares:
            pooled = math.sqrt(math.fsum(self.squares) / (dof * len(self.squares)))
            if alone > 2 * pooled:  # a rougher line, or one too curved for a parabola
                return math.sqrt(2) * bound
        self.squares.append(mine)
        pooled = math.sqrt(math.fsum(self.squares) / (dof * len(self.squares)))
        known = _STUDENT_T[min(len(self.squares), len(_STUDENT_T)) - 1]
        return math.sqrt(2) * min(bound, known * max(pooled, floor))


def judged(values: AlongLine, scatter: Scatter) -> LineResult:
    """Return the judgment of a line: the loss's change compared with the integral of its slope."""
    f, d, h = values.losses, values.slopes.sum(axis=1), 1 / (POINTS - 1)
    predicted, rougher = _simpson(d, h), _simpson(d[::2], 2 * h)
    apart = f - f[0] - _cumulated(d, h)
    s = np.linspace(0.0, 1.0, POINTS)
    left = apart - np.polynomial.Polynomial.fit(s, apart, 2)(s)
    floor = values.loss_eps * float(np.abs(f).max()) / 4
    scale = max(abs(predicted), math.sqrt(float(values.reach @ values.reach)))
    squares = float(left @ left)
    return LineResult(
        rough=scatter.rough(squares, floor),
        squares=squares,
        measured=float(f[-1] - f[0]),
        predicted=predicted,
        quadrature=abs(predicted - rougher),
        rounding=scatter.allowed(squares, floor),
        slope_rounding=4
        * values.slope_eps
        * scale,  # a gradient passes through a few ops, each of which rounds
    )


@dataclass(frozen=True, kw_only=True)
class CheckLines:
    """Along which lines a check goes. seed: of their random directions. most_lines: the largest number of them.

    say: called with a line of text before each part of the work.
    """

    seed: int
    most_lines: int
    say: Callable[[str], None] | None = None

    def told(self, text: str) -> None:
        if self.say is not None:
            self.say(text)


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """The plan whose steps are checked, as ``GradientCheck`` names it."""

    model: str
    devices: int
    lowering: str
    remarks: Sequence[str] = ()


def gradient_check(
    steps: GradientSteps,
    reference: GradientReference | str,
    doubts: Mapping[str, str],
    plan: CheckedPlan,
    lines: CheckLines,
    advice: str | None = None,
) -> GradientCheck:
    """Check the gradients of a plan's steps.

    reference: another program's gradients, or a text that says why there are none.
    doubts: see ``parameter_checks``. advice: see ``GradientCheck``.
    """
    began = time.perf_counter()
    found = None if isinstance(reference, str) else reference
    checks = parameter_checks(steps, found, doubts, lines.seed, lines.most_lines, lines.told)
    notes = [*plan.remarks, *([] if steps.jittered else [_NOT_FINITE])]
    made = GradientCheck(
        model=plan.model,
        devices=plan.devices,
        lowering=plan.lowering,
        loss=steps.loss,
        parameters=tuple(map(_with_copies, checks, steps.copies)),
        reference=found,
        no_reference=reference if isinstance(reference, str) else "",
        remarks=tuple(notes),
        steps=steps.count,
        seconds=time.perf_counter() - began,
    )
    return made if advice is None else replace(made, advice=advice)


_NOT_FINITE = "the loss is not finite near these parameters, so the lines start exactly at them"


def _with_copies(p: ParameterCheck, copies: GradientDifference) -> ParameterCheck:
    """Return the check, with verdict off if devices that hold the same part of a parameter have different gradients."""
    if copies.verdict != "off":
        return p
    differ = f"devices that hold the same part of it have gradients that differ by {copies.relative:.2g} of the largest"
    return replace(p, verdict="off", why=f"{differ}; {p.why}" if p.verdict == "off" else differ)


def _simpson(d: np.ndarray, h: float) -> float:
    return float(h / 3 * (d[0] + d[-1] + 4 * d[1:-1:2].sum() + 2 * d[2:-1:2].sum()))


def _cumulated(d: np.ndarray, h: float) -> np.ndarray:
    """Return the integral up to each point: by Simpson's rule for even points, and by its parabola for odd ones."""
    out = np.zeros(POINTS)
    for k in range(0, POINTS - 1, 2):
        out[k + 1] = out[k] + h / 12 * (5 * d[k] + 8 * d[k + 1] - d[k + 2])
        out[k + 2] = out[k] + h / 3 * (d[k] + 4 * d[k + 1] + d[k + 2])
    return out


@dataclass(frozen=True, kw_only=True)
class OnLines:
    """What lines of one direction say about a parameter."""

    verdict: GradientVerdict
    size: float
    why: str = ""
    resolution: float | None = None
    result: LineResult | None = None


@dataclass(frozen=True, kw_only=True)
class _Together:
    """A group of parameters that move together along a line."""

    members: tuple[int, ...]
    size: float
    tries: int = 0
    still: bool = False
    """Whether these are parameters whose gradients consist of rounding only, so that the loss should not change."""
    squares: float | None = None
    """The sum of squares of a previous line that was too rough."""

    def halves(self) -> list[_Together]:
        half = len(self.members) // 2
        return [replace(self, members=m) for m in (self.members[:half], self.members[half:]) if m]


@dataclass(kw_only=True)
class _LineSearch:
    """Runs lines of one direction: first with all parameters together, then with fewer, until each is decided."""

    steps: GradientSteps
    direction: Direction
    seed: int
    scatter: Scatter
    most: int
    """The number of lines that may be run."""
    say: Callable[[str], None]
    lines: int = 0

    def run(self, groups: Sequence[_Together]) -> dict[int, OnLines]:
        found: dict[int, OnLines] = {}
        waiting = list(groups)
        while waiting:
            group = waiting.pop()
            if self.lines >= self.most:
                why = "the lines allowed for the check were used up"
                found |= dict.fromkeys(group.members, OnLines(verdict="undecided", why=why, size=group.size))
                continue
            waiting += self._decided(group, found)
        return found

    def _decided(self, group: _Together, found: dict[int, OnLines]) -> list[_Together]:
        """Add what a line with these parameters decides to ``found``; return the groups that are left."""
        values = self._along(group.members, group.size, self.seed)
        if not np.isfinite(values.losses).all() or not np.isfinite(values.slopes).all():
            return self._shorter(
                group, found, "the loss or a gradient is not a finite number near these parameters"
            )
        result = judged(values, self.scatter)
        if result.disagrees:
            if len(group.members) > 1:
                return _by_reach(group, values.reach).halves()
            (only,) = group.members
            found[only] = self._confirmed(only, group.size, result, values)
            return []
        if group.still:
            why = "the loss does not change along its lines, and its gradient consists of rounding only"
            found |= dict.fromkeys(group.members, OnLines(verdict="agrees", why=why, size=group.size))
            return []
        resolution = {i: result.allowed / max(float(values.reach[i]), 1e-300) for i in group.members}
        decided = [i for i in group.members if resolution[i] <= _RESOLUTION]
        for i in decided:
            found[i] = OnLines(verdict="agrees", resolution=resolution[i], result=result, size=group.size)
        rest = tuple(i for i in group.members if i not in found)
        if not rest:
            return []
        left = _by_reach(replace(group, members=rest), values.reach)
        if result.slope_rounding > max(result.rounding, result.quadrature) and len(rest) > 1:
            # The gradients of the others round by more than a single parameter changes the loss.
            return left.halves()
        if result.rough and group.squares is not None and result.squares > group.squares / 4:
            # The line is a quarter as long and scatters as much, so this is rounding after all.
            self.scatter.squares.append(result.squares)
            return self._longer(left, resolution, found)
        if result.rough or result.quadrature > result.rounding:
            why = "the loss is too rough along lines of this parameter"
            left = replace(left, squares=result.squares)
            return [left] if decided else self._shorter(left, found, why)
        return self._longer(left, resolution, found)

    def _longer(
        self, group: _Together, resolution: Mapping[int, float], found: dict[int, OnLines]
    ) -> list[_Together]:
        """Return the group with longer lines, along which its slope exceeds the rounding of the loss."""
        wanted = {i: 1.25 * group.size * resolution[i] / _RESOLUTION for i in group.members}
        near = tuple(i for i in group.members if wanted[i] <= _LARGEST_SIZE)
        far = tuple(i for i in group.members if wanted[i] > _LARGEST_SIZE)
        again = []
        if near and group.tries < _TRIES:
            size = max(wanted[i] for i in near)
            again.append(replace(group, members=near, size=size, tries=group.tries + 1))
        elif near:
            far = group.members
        if far and group.size < _LARGEST_SIZE and group.tries < _TRIES:
            again.append(replace(group, members=far, size=_LARGEST_SIZE, tries=_TRIES))
        elif far:
            why = "it changes the loss by less than rounding does"
            found |= dict.fromkeys(far, OnLines(verdict="undecided", why=why, size=group.size))
        return again

    def _shorter(self, group: _Together, found: dict[int, OnLines], why: str) -> list[_Together]:
        if group.tries < _TRIES:
            return [replace(group, size=group.size / 4, tries=group.tries + 1)]
        if len(group.members) > 1:
            return [replace(g, tries=_TRIES // 2) for g in group.halves()]
        found |= dict.fromkeys(group.members, OnLines(verdict="undecided", why=why, size=group.size))
        return []

    def _confirmed(self, i: int, size: float, first: LineResult, values: AlongLine) -> OnLines:
        """Run a second, shorter line for a single parameter that disagreed. It is off if that line disagrees, too."""
        again = judged(self._along((i,), size / 2, self.seed + 1), self.scatter)
        if not again.disagrees:
            why = "one of two lines disagrees; the loss may jump near these parameters"
            return OnLines(verdict="undecided", why=why, size=size)
        reach = float(values.reach[i])
        return OnLines(
            verdict="off",
            why=f"along its {self.direction} line the loss changes by {first.measured:.4g}, but its gradient predicts "
            f"{first.predicted:.4g} (rounding explains {first.allowed:.1g})",
            resolution=first.allowed / reach if reach else None,
            result=first,
            size=size,
        )

    def _along(self, members: tuple[int, ...], size: float, seed: int) -> AlongLine:
        self.say(f"{self.direction} line {self.lines + 1}, {len(members)} parameters")
        self.lines += 1
        return self.steps.along(Line(direction=self.direction, perturbed=members, size=size, seed=seed))


def _by_reach(group: _Together, reach: np.ndarray) -> _Together:
    """Return the group sorted by reach, so that parameters that change the loss alike are neighbors."""
    return replace(group, members=tuple(sorted(group.members, key=lambda i: -reach[i])))


def parameter_checks(
    steps: GradientSteps,
    reference: GradientReference | None,
    doubts: Mapping[str, str],
    seed: int,
    most_lines: int,
    say: Callable[[str], None],
) -> tuple[ParameterCheck, ...]:
    """Return each parameter's verdict. No lines are run for a parameter about which an exact reference decides.

    doubts: parameter -> the part of the program between it and the loss whose gradient may differ from the slope: a
        stopped gradient, a derivative rule of the user's, a discrete choice. It matters only without a reference.
    """
    found: list[dict[int, OnLines]] = []
    # Two random directions, because a single one may miss an error of the size of its resolution by chance.
    passes: tuple[tuple[Direction, int], ...] = (
        ("random", seed),
        ("gradient", seed),
        ("random", seed + 1000),
    )
    noise, open_ = steps.gradient_noise, _undecided_by(reference, steps.names)
    still = tuple(i for i in open_ if not noise[i] <= _NOISE_ALONE)
    known = [i for i in open_ if i not in still]
    scatter, used = Scatter(), 0
    if known and most_lines:
        say(PieceOfWork("how far rounding scatters the loss", 0, 1 + len(passes)))
        used += _measure_scatter(steps, known, seed, scatter)
    for k, (direction, s) in enumerate(passes if open_ else ()):
        say(PieceOfWork("the loss along lines of parameters", 1 + k, 1 + len(passes)))
        search = _LineSearch(
            steps=steps, direction=direction, seed=s, scatter=scatter, most=most_lines - used, say=say
        )
        sizes = {i: found[0][i].size if k == 2 else _FIRST_SIZE[direction] for i in known}
        groups = [
            _Together(members=tuple(i for i in known if sizes[i] == size), size=size)
            for size in sorted(set(sizes.values()))
        ]
        if still and k == 0:
            groups.append(_Together(members=still, size=_LARGEST_SIZE / 4, still=True))
        found.append(search.run(groups))
        used += search.lines
        known = [i for i in known if found[-1][i].verdict != "off"]
    by_parameter = [[f[i] for f in found if i in f] for i in range(len(noise))]
    return verdicts(steps.names, by_parameter, reference, doubts)


def _undecided_by(reference: GradientReference | None, names: Sequence[str]) -> list[int]:
    """Return the parameters about which only lines can decide."""
    if reference is None or not reference.exact:
        return list(range(len(names)))
    decided = {d.name for d in reference.differences if d.verdict != "undecided"}
    return [i for i, name in enumerate(names) if name not in decided]


def verdicts(
    names: Sequence[str],
    found: Sequence[Sequence[OnLines]],
    reference: GradientReference | None,
    doubts: Mapping[str, str],
) -> tuple[ParameterCheck, ...]:
    """Return each parameter's verdict from the lines (``found``, per parameter) and from the reference."""
    beside = {} if reference is None else {d.name: d for d in reference.differences}
    return tuple(
        _combined(name, lines, reference, beside.get(name), doubts.get(name))
        for name, lines in zip(names, found, strict=True)
    )


def _measure_scatter(steps: GradientSteps, perturbed: Sequence[int], seed: int, scatter: Scatter) -> int:
    """Measure rounding on a first line, and return how many lines were run.

    The line is so short that the loss is a parabola along it, even if gradients are wrong. What is left is rounding.
    Later lines are compared with it, so that one wrong gradient, or one that differs from the slope on purpose, does
    not pass for rounding.
    """
    size = min(steps.coarsest ** (1 / 3) / 2, _FIRST_SIZE["random"])  # x³ is below rounding
    values = steps.along(Line(direction="random", perturbed=tuple(perturbed), size=size, seed=seed + 2000))
    if np.isfinite(values.losses).all() and np.isfinite(values.slopes).all():
        judged(values, scatter)
    return 1


def _combined(
    name: str,
    found: Sequence[OnLines],
    reference: GradientReference | None,
    beside: GradientDifference | None,
    doubt: str | None,
) -> ParameterCheck:
    """Return the verdict from the lines and from the reference. found: empty if the reference decides."""
    lines = next(
        (f for v in ("off", "undecided", "agrees") for f in found if f.verdict == v),
        OnLines(verdict="undecided", size=0.0),
    )
    kind = "" if reference is None else reference.kind
    verdict, why = lines.verdict, lines.why
    if beside is not None and reference is not None:
        differs = f"its gradient differs from that of {kind} by {beside.relative:.2g} of the largest element"
        if beside.verdict == "agrees" and lines.verdict != "agrees":
            verdict, why = (
                "agrees",
                f"its gradient is that of {kind}" + (f"; {lines.why}" if lines.why else ""),
            )
        elif beside.verdict == "off" and (reference.exact or lines.verdict == "off"):
            verdict, why = "off", f"{differs}; {lines.why}" if lines.verdict == "off" else differs
        elif beside.verdict == "off":
            # One of the two programs is wrong, and the slope of the loss does not say that it is this one.
            verdict, why = "undecided", f"{differs}, but agrees with the slope of the loss"
    if verdict == "off" and doubt is not None and (beside is None or beside.verdict == "undecided"):
        verdict, why = (
            "undecided",
            f"{lines.why}, but {doubt} lies between it and the loss, so this may be intended",
        )
    seen = [f.resolution for f in found if f.resolution is not None]
    return ParameterCheck(
        name=name,
        verdict=verdict,
        why=why,
        measured=None if lines.result is None else lines.result.measured,
        predicted=None if lines.result is None else lines.result.predicted,
        resolution=max(seen, default=None),
        difference=None if beside is None else beside.relative,
    )
