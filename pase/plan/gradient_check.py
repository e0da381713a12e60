"""The result of a check of a plan's gradients, parameter by parameter: as values, as text, and as JSON.

``plan.jax.check`` and ``plan.torch.check`` return it (``pase.plan.gradient_lines`` computes the numbers). There are two
tests. The first needs only the step itself: along a straight line of parameters, the loss must change by the integral
of the gradient. The second compares each gradient with that of another program of the same model, if one fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pase.errors import PaseError
from pase.files.json_values import JsonObject

__all__ = ["GradientCheck", "GradientDifference", "GradientReference", "GradientVerdict", "ParameterCheck"]

GradientVerdict = Literal["agrees", "off", "undecided"]

_SHOWN = 12
"""How many parameters the text shows per verdict; the JSON form has all of them."""


@dataclass(frozen=True, kw_only=True)
class GradientDifference:
    """One parameter's gradient in two programs, or an array of the state that a step leaves.

    difference: the largest difference between elements, in absolute value.
    largest: the largest of the reference's elements, in absolute value.
    noise: how far the reference's own result changes if all of its inputs are rounded differently.
    """

    name: str
    difference: float
    largest: float
    noise: float
    eps: float
    """The spacing of numbers just above 1 in the gradient's dtype."""

    @property
    def allowed(self) -> float:
        """The largest difference that rounding explains.

        Sums in another order round differently, once in each of the log2(n) levels of a tree of partial sums. There are
        fewer than 32 levels.
        """
        return 16 * self.noise + 32 * self.eps * self.largest

    @property
    def verdict(self) -> GradientVerdict:
        if not self.difference <= self.allowed:  # also true if the difference is not a number
            return "off"
        return "undecided" if self.allowed > 0.1 * self.largest > 0 else "agrees"

    @property
    def relative(self) -> float:
        """The difference, relative to the largest element."""
        if not self.largest:
            return float("inf") if self.difference else 0.0
        return self.difference / self.largest


@dataclass(frozen=True, kw_only=True)
class GradientReference:
    """The same gradients, computed by another program.

    kind: which program it is, in words.
    exact: whether it is the user's own program on one device, which is right by definition.
    loss_allowed: the difference of the losses that rounding explains.
    """

    kind: str
    exact: bool
    loss: float
    loss_reference: float
    loss_allowed: float
    differences: tuple[GradientDifference, ...]
    state: tuple[GradientDifference, ...] = ()
    """What the step hands to the next one in addition to parameters: batch statistics, random streams, caches."""

    @property
    def loss_agrees(self) -> bool:
        return abs(self.loss - self.loss_reference) <= self.loss_allowed

    @property
    def state_off(self) -> tuple[GradientDifference, ...]:
        """The state that the step leaves in another way than the reference does."""
        return tuple(d for d in self.state if d.verdict == "off")


@dataclass(frozen=True, kw_only=True)
class ParameterCheck:
    """One trained parameter.

    why: what the verdict is based on.
    measured, predicted: the change of the loss along the line that says most about the parameter, and the change that
        the gradient predicts. None if the parameter was not moved.
    resolution: the smallest error that would have shown, as a fraction of the gradient, in any direction. None if the
        loss does not depend on the parameter.
    difference: the difference from the reference's gradient, relative to its largest element. None without a reference.
    """

    name: str
    verdict: GradientVerdict
    why: str
    measured: float | None = None
    predicted: float | None = None
    resolution: float | None = None
    difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class GradientCheck:
    """Whether a plan's step computes the gradient of its own loss.

    steps: how many steps were run.
    seconds: how long the check took.
    """

    model: str
    devices: int
    lowering: str
    loss: float
    parameters: tuple[ParameterCheck, ...]
    reference: GradientReference | None
    no_reference: str
    """Why there is no reference; empty if there is one."""
    remarks: tuple[str, ...]
    steps: int
    seconds: float
    advice: str = "Another lowering may be right: check it with plan.jax.check(…, lowering='annotated')"
    """What else to try if a gradient is off; may be empty."""

    @property
    def verdict(self) -> GradientVerdict:
        found = {p.verdict for p in self.parameters}
        r = self.reference
        if "off" in found or (r is not None and (not r.loss_agrees or r.state_off)):
            return "off"
        return "undecided" if "undecided" in found or not found else "agrees"

    def by(self, verdict: GradientVerdict) -> tuple[ParameterCheck, ...]:
        """Return the parameters with this verdict, the largest error first."""
        mine = [p for p in self.parameters if p.verdict == verdict]
        return tuple(sorted(mine, key=lambda p: -(p.difference or 0.0)))

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_json(self) -> JsonObject:
        """Return everything that was found, for programs."""
        return {
            "verdict": self.verdict,
            "model": self.model,
            "devices": self.devices,
            "lowering": self.lowering,
            "loss": _number(self.loss),
            "reference": None
            if self.reference is None
            else {
                "kind": self.reference.kind,
                "loss": _number(self.reference.loss_reference),
                "loss_allowed": _number(self.reference.loss_allowed),
                "loss_agrees": self.reference.loss_agrees,
                "state_off": [d.name for d in self.reference.state_off],
            },
            "no_reference": self.no_reference,
            "parameters": [
                {
                    "name": p.name,
                    "verdict": p.verdict,
                    "why": p.why,
                    "measured": _number(p.measured),
                    "predicted": _number(p.predicted),
                    "resolution": _number(p.resolution),
                    "difference": _number(p.difference),
                }
                for p in self.parameters
            ],
            "remarks": list(self.remarks),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
        }

    def raise_if_off(self) -> None:
        """Raise PaseError that names the parameters whose gradient is off. Warn if some could not be decided."""
        if self.verdict == "off":
            what = "the gradient of the model's loss"
            if not self.by("off") and self.reference is not None and self.reference.loss_agrees:
                what = "the model's next state"
            raise PaseError(
                f"this step does not compute {what}:\n{self}",
                fix=f"please report it with the plan (plan.save). {self.advice}".rstrip(),
            )
        for remark in self.remarks:
            warnings.warn(f"check of the gradients: {remark}", stacklevel=3)
        if left := self.by("undecided"):
            warnings.warn(
                f"the check of the gradients could not decide {len(left)} of {len(self.parameters)} parameters: "
                f"{left[0].name}: {left[0].why}; print(step.result) shows all of them",
                stacklevel=3,
            )


def _number(x: float | None) -> float | str | None:
    """Return the number, or its text if it is infinite or NaN, which JSON does not have."""
    return x if x is None or abs(x) < float("inf") else str(x)


_WORDS: dict[GradientVerdict, str] = {"agrees": "THEY AGREE", "off": "OFF", "undecided": "UNDECIDED"}


def _lines(c: GradientCheck) -> Iterator[str]:
    """Yield the lines of the text, of at most 80 columns."""
    yield from _wrapped(
        f"gradients of {c.model} on {c.devices} device{'s' * (c.devices > 1)}, {c.lowering}: {_WORDS[c.verdict]}"
    )
    counts = [f"{len(some)} {word}" for word in _WORDS if (some := c.by(word))]
    yield from _wrapped(
        f"{len(c.parameters)} parameters: {', '.join(counts)} · loss {c.loss:.6g} · {c.steps} steps, {c.seconds:.1f} s"
    )
    if (ref := c.reference) is not None:
        # A gradient that consists of rounding alone differs by as much as its own size.
        largest = max((d.relative for d in ref.differences if d.verdict != "undecided"), default=0.0)
        yield from _wrapped(
            f"against {ref.kind}: loss {ref.loss_reference:.6g} {'agrees' if ref.loss_agrees else 'DIFFERS'}, "
            f"gradients differ by at most {largest:.1e} of the largest"
        )
        for d in ref.state_off[:_SHOWN]:
            yield from _wrapped(
                f"OFF state {d.name}: after the step it differs from that of {ref.kind} by {d.difference:.2g} "
                f"(its largest element is {d.largest:.2g})"
            )
    else:
        yield from _wrapped(f"no other program to compare with: {c.no_reference}")
    resolved = [p for p in c.parameters if p.resolution is not None]
    if resolved:
        worst = max(resolved, key=lambda p: p.resolution or 0.0)
        yield from _wrapped(
            f"along lines of parameters: an error of {worst.resolution:.1%} of a gradient shows ({worst.name})"
        )
    for word in ("off", "undecided"):
        for p in c.by(word)[:_SHOWN]:
            yield from _wrapped(f"{_WORDS[word]} {p.name}: {p.why}")
        if (more := len(c.by(word)) - _SHOWN) > 0:
            yield f"  … {_WORDS[word]} {more} more"
    for remark in c.remarks:
        yield from _wrapped(f"note: {remark}")


def _wrapped(line: str) -> list[str]:
    import textwrap

    return textwrap.wrap(line, 80, subsequent_indent="    ", break_long_words=True, break_on_hyphens=False)
