"""The numbers of a check of gradients, on functions whose gradients are known: planted faults are found by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pase.errors import PaseError
from pase.plan.gradient_check import GradientCheck, GradientDifference, GradientReference
from pase.plan.gradient_lines import parameter_checks
from pase.plan.gradient_steps import POINTS, AlongLine, Line

Arrays = list[np.ndarray]
NAMES = ("w", "b", "scale", "v")


def network(x: Arrays) -> tuple[float, Arrays]:
    """A loss with a kink, exp and a product, and its gradient by hand."""
    w, b, scale, v = x
    data = np.linspace(-1, 1, 48).reshape(6, 8)
    before = data @ w.reshape(8, 6) + b
    h = np.maximum(before, 0.0)
    g = np.exp(scale)
    y = (h * g) @ v
    loss = float(np.mean((y - 0.3) ** 2)) + 1.0
    dy = 2 * (y - 0.3) / len(y)
    dh = np.outer(dy, v) * g
    mask = before > 0
    return loss, [
        (data.T @ (dh * mask)).ravel(),
        (dh * mask).sum(0),
        (np.outer(dy, v) * h * g).sum(0),
        (h * g).T @ dy,
    ]


def start(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n) * s for n, s in ((48, 0.3), (6, 0.1), (6, 0.5), (6, 0.3))]


@dataclass
class NumpySteps:
    """Steps of a function in numpy.

    wrong: the planted fault, gradients -> gradients.
    rounded: whether the loss is rounded to float32.
    """

    wrong: Callable[[Arrays], Arrays] = lambda g: g
    fn: Callable[[Arrays], tuple[float, Arrays]] = network
    rounded: bool = True
    names: tuple[str, ...] = NAMES
    point: Arrays = field(default_factory=start)
    steps: int = 0

    def run(self, x: Arrays) -> tuple[float, Arrays]:
        self.steps += 1
        loss, grads = self.fn(x)
        return float(np.float32(loss)) if self.rounded else loss, self.wrong([g.copy() for g in grads])

    @property
    def coarsest(self) -> float:
        return 2.0**-23 if self.rounded else 2.0**-52

    @property
    def gradient_noise(self) -> np.ndarray:
        first = self.run(self.point)[1]
        other = self.run([x * (1 + 1e-7) for x in self.point])[1]
        sizes = [np.linalg.norm(g) for g in first]
        return np.array(
            [np.linalg.norm(a - b) / n if n else np.inf for a, b, n in zip(first, other, sizes, strict=True)]
        )

    def along(self, line: Line) -> AlongLine:
        grads = self.run(self.point)[1]
        toward = [np.zeros_like(x) for x in self.point]
        for i in line.perturbed:
            rng = np.random.default_rng((line.seed, i))
            x, g = self.point[i], grads[i]
            by = rng.choice([-1, 1], x.shape) * rng.uniform(0.5, 1, x.shape) * np.abs(x)
            up = g * np.linalg.norm(x) / max(np.linalg.norm(g), 1e-30)
            toward[i] = line.size * (by if line.direction == "random" else up)
        losses, slopes = [], []
        for s in np.linspace(0, 1, POINTS):
            loss, g = self.run([x + s * d for x, d in zip(self.point, toward, strict=True)])
            losses.append(loss)
            slopes.append([float(a @ d) for a, d in zip(g, toward, strict=True)])
        reach = np.array([np.linalg.norm(g) * np.linalg.norm(d) for g, d in zip(grads, toward, strict=True)])
        if line.direction == "random":
            reach /= np.sqrt([x.size for x in self.point])
        return AlongLine(
            losses=np.array(losses),
            slopes=np.array(slopes),
            reach=reach,
            loss_eps=self.coarsest,
            slope_eps=self.coarsest,
        )


def checked(
    steps: NumpySteps,
    reference: GradientReference | None = None,
    doubts: dict[str, str] | None = None,
    most: int = 200,
) -> GradientCheck:
    found = parameter_checks(steps, reference, doubts or {}, 0, most, lambda text: None)
    return GradientCheck(
        model="network",
        devices=8,
        lowering="manual",
        loss=1.5,
        parameters=found,
        reference=reference,
        no_reference="" if reference else "not asked for",
        remarks=(),
        steps=steps.steps,
        seconds=0.1,
    )


def planted(i: int, how: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], Arrays]:
    return lambda g: [how(x) if k == i else x for k, x in enumerate(g)]


def one_part(x: np.ndarray, to: float) -> np.ndarray:
    """Multiply the first of two devices' parts by ``to``."""
    return np.concatenate([x[: len(x) // 2] * to, x[len(x) // 2 :]])


FAULTS = {
    "zero": lambda x: x * 0,
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "negated": lambda x: -x,
    "a device's part is missing": lambda x: one_part(x, 0.0),
    "a device's part counts twice": lambda x: one_part(x, 2.0),
    "parts in the wrong order": lambda x: np.roll(x, len(x) // 2),
    "reversed": lambda x: x[::-1],
}


@pytest.mark.parametrize("rounded", [True, False], ids=["float32", "float64"])
@pytest.mark.parametrize("seed", range(5))
def test_a_right_gradient_agrees(seed, rounded):
    steps = NumpySteps(point=start(seed), rounded=rounded)
    found = checked(steps)
    assert found.verdict == "agrees", str(found)
    assert steps.steps < 250
    found.raise_if_off()


@pytest.mark.parametrize("i", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_name(fault, i):
    found = checked(NumpySteps(wrong=planted(i, FAULTS[fault])))
    assert [p.name for p in found.by("off")] == [NAMES[i]], str(found)
    with pytest.raises(PaseError, match=f"OFF {NAMES[i]}: along") as e:
        found.raise_if_off()
    assert "report" in e.value.fix


def test_two_faults_that_cancel_together_are_found():
    steps = NumpySteps(wrong=lambda g: [2 * g[0], 0 * g[1], g[2], g[3]])
    assert [p.name for p in checked(steps).by("off")] == ["w", "b"]


def test_what_rounding_hides_is_undecided():
    """A loss of a million in float32 does not show changes below 0.1."""

    def far(x: Arrays) -> tuple[float, Arrays]:
        loss, grads = network(x)
        return loss + 1e6, grads

    found = checked(NumpySteps(fn=far))
    assert found.verdict == "undecided" and not found.by("off")
    with pytest.warns(UserWarning, match="4 of 4 parameters"):
        found.raise_if_off()


def test_a_much_curved_loss_is_decided_along_shorter_lines():
    """Its curvature is not taken for rounding, and lines do not become longer because of it."""

    def waves(x: Arrays) -> tuple[float, Arrays]:
        loss, grads = network(x)
        bent = 0.02 * np.sin(400 * x[3]) + 0.02 * np.abs(np.sin(170 * x[3]))
        slope = 8 * np.cos(400 * x[3]) + 3.4 * np.cos(170 * x[3]) * np.sign(np.sin(170 * x[3]))
        return loss + float(bent.sum()), [*grads[:3], grads[3] + slope]

    steps = NumpySteps(fn=waves, rounded=False)
    found = checked(steps)
    assert found.verdict == "agrees" and steps.steps < 200, str(found)


def test_a_loss_that_jumps_is_no_false_alarm():
    def rounded_off(x: Arrays) -> tuple[float, Arrays]:
        loss, grads = network(x)
        return loss + 0.05 * float(np.sum(np.floor(40 * x[3]) % 2)), grads

    assert [p.name for p in checked(NumpySteps(fn=rounded_off)).by("off")] == []


def test_a_gradient_of_rounding_alone_agrees():
    """An example is the key bias of an attention: its gradient is zero, and what is computed is noise."""
    noise = iter(np.random.default_rng(0).normal(size=(10_000, 6)) * 1e-9)

    def still(x: Arrays) -> tuple[float, Arrays]:
        loss, grads = network([x[0], np.full(6, 0.1), x[2], x[3]])
        return loss, [grads[0], next(noise), *grads[2:]]

    found = checked(NumpySteps(fn=still))
    assert found.verdict == "agrees" and "rounding" in found.parameters[1].why


def straight_through(x: Arrays) -> tuple[float, Arrays]:
    """The gradient of the last parameter differs from the slope on purpose."""
    loss, grads = network(x)
    return loss, [*grads[:3], 3 * grads[3]]


def reference_of(
    fn: Callable[[Arrays], tuple[float, Arrays]], exact: bool = True, to: float = 1.0
) -> GradientReference:
    loss, grads = fn(start())
    differences = [
        GradientDifference(
            name=name,
            difference=float(np.abs(g - to * g).max()),
            largest=float(np.abs(g).max()),
            noise=1e-8,
            eps=2.0**-23,
        )
        for name, g in zip(NAMES, grads, strict=True)
    ]
    return GradientReference(
        kind="the unsharded step",
        exact=exact,
        loss=loss,
        loss_reference=loss,
        loss_allowed=1e-6,
        differences=tuple(differences),
    )


def test_a_gradient_that_is_meant_not_to_be_the_slope():
    alone = checked(NumpySteps(fn=straight_through))
    assert [p.name for p in alone.by("off")] == ["v"]
    doubted = checked(NumpySteps(fn=straight_through), doubts={"v": "a stopped gradient at model.py:3"})
    assert [p.name for p in doubted.by("undecided")] == ["v"] and "model.py:3" in doubted.parameters[3].why
    steps = NumpySteps(fn=straight_through)
    known = checked(steps, reference_of(straight_through))
    assert steps.steps == 2, "no lines are needed"
    assert known.verdict == "agrees" and "is that of the unsharded step" in known.parameters[3].why


def test_another_program_has_other_gradients():
    off = checked(NumpySteps(), reference_of(network, to=1.01))
    assert len(off.by("off")) == 4 and "differs from that of the unsharded step by 0.01" in str(off)
    # One of two lowerings of a plan is wrong. The slope of the loss says that it is the other one.
    either = checked(NumpySteps(), reference_of(network, exact=False, to=1.01))
    assert len(either.by("undecided")) == 4 and "agrees with the slope" in either.parameters[0].why


def test_another_loss_is_off():
    found = reference_of(network)
    other = GradientReference(**{**vars(found), "loss_reference": found.loss + 0.1})
    assert checked(NumpySteps(), other).verdict == "off"


def test_not_a_number():
    found = checked(NumpySteps(fn=lambda x: (float("nan"), network(x)[1])))
    assert found.verdict == "undecided" and "not a finite number" in found.parameters[0].why
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["verdict"] == "undecided"


def test_few_lines_leave_parameters_undecided():
    found = checked(NumpySteps(), most=0)
    assert len(found.by("undecided")) == 4 and "were used up" in found.parameters[0].why


def test_the_text_fits_80_columns():
    steps = NumpySteps(wrong=planted(0, FAULTS["zero"]), names=("encoder.layers.0." * 9 + "w", *NAMES[1:]))
    lines = str(checked(steps)).splitlines()
    assert max(map(len, lines)) <= 80 and "OFF" in lines[0]
