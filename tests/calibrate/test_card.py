"""A GPU's file is fitted to a few dozen ops: of a simulated card, and of a recorded H100."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.cases.recorded_card import recorded_card
from pase.calibrate.card import calibrate_card, card_facts, card_file, card_lines
from pase.calibrate.card_ops import CardOp, card_ops
from pase.calibrate.figures import prices
from pase.costmodels.analytic import Analytic
from pase.errors import PaseError
from pase.machine import Machine, dumps, load
from tests.needs import SHARED

ALONE = partial(Analytic, steady=False)
BASE = load("h100x8")
LEAST_S = 1.4e-6


@dataclass(kw_only=True)
class SimulatedCard:
    """Kernels that take what the model says of another machine, with noise. broken: labels of ops that do not run."""

    machine: Machine
    noise: float = 0.03
    broken: tuple[str, ...] = ()
    timed: list[CardOp] = field(default_factory=list)

    def seconds(self, ops: Sequence[CardOp]) -> list[float | None]:
        self.timed += ops
        random, model = np.random.default_rng(len(self.timed)), ALONE(self.machine)
        return [
            None
            if op.label in self.broken
            else float(prices(model, [op.work], LEAST_S)[0]) * math.exp(random.normal(0, self.noise))
            for op in ops
        ]


def other_card() -> Machine:
    """An H100 of which nearly every figure is another one."""
    d = BASE.device
    assert d.products is not None
    products = replace(
        d.products,
        rate={**d.products.rate, "bfloat16": 0.6, "float32": 0.5},
        unaligned={**d.products.unaligned, "bfloat16": 0.1, "float32": 0.2},
        start_s=4e-6,
        memory=0.6,
    )
    efficiency = {**d.efficiency, "memory": 0.55, "conv": 0.3}
    return replace(BASE, device=replace(d, products=products, efficiency=efficiency))


def test_another_card_s_figures_are_found() -> None:
    truth, said = other_card(), list[str]()
    fit = calibrate_card(
        BASE, SimulatedCard(machine=truth), ALONE, 60, lambda what, done, of: said.append(what)
    )
    found, want = fit.machine.device.products, truth.device.products
    assert found is not None and want is not None
    assert found.rate["bfloat16"] == pytest.approx(0.6, rel=0.05)
    assert found.rate["float32"] == pytest.approx(0.5, rel=0.05)
    assert found.rate["float16"] == found.rate["bfloat16"]
    assert found.unaligned["bfloat16"] == pytest.approx(0.1, rel=0.1)
    assert found.start_s == pytest.approx(want.start_s, rel=0.1)
    assert fit.machine.device.efficiency["memory"] == pytest.approx(0.55, rel=0.05)
    assert fit.machine.device.efficiency["conv"] == pytest.approx(0.3, rel=0.05)
    error, before = fit.error(fitted=False), [abs(t.before_s / t.measured_s - 1) for t in fit.timed]
    assert error is not None and error < 0.05 < statistics.median(before)
    assert said and not any(t.fitted for t in fit.timed if t.op.extents == (1, 4096, 4097, 4096))


def test_the_file_says_what_it_is_from_and_is_read_again(tmp_path: Path) -> None:
    fit = calibrate_card(BASE, SimulatedCard(machine=other_card()), ALONE, 60, lambda *_: None)
    machine = card_file(BASE, fit, "mine", {"date": "today"})
    (tmp_path / "mine.toml").write_text(dumps(machine))
    assert load(str(tmp_path / "mine.toml")) == machine
    assert machine.provenance["base"].startswith("h100x8") and "fitted to" in machine.provenance["card"]
    assert machine.levels == BASE.levels and machine.device.memory_bytes == BASE.device.memory_bytes
    facts = card_facts(fit)
    lines = list(card_lines(facts))
    assert any(line.startswith("products.rate bfloat16: 0.867 -> ") for line in lines)
    assert any("were not fitted, and are predicted" in line for line in lines)
    assert len(facts["ops"]) == len(card_ops())


def test_a_budget_that_is_spent_ends_the_rounds() -> None:
    clock = iter(range(0, 10_000, 50))
    card = SimulatedCard(machine=other_card())
    fit = calibrate_card(BASE, card, ALONE, 120, lambda *_: None, now=lambda: float(next(clock)))
    assert len(fit.timed) == len(card.timed) < len(card_ops())


def test_ops_that_do_not_run_are_named() -> None:
    ops = card_ops()
    broken = tuple(op.label for op in ops if op.kind == "conv")
    fit = calibrate_card(BASE, SimulatedCard(machine=BASE, broken=broken), ALONE, 60, lambda *_: None)
    assert sorted(fit.left_out) == sorted(broken) and "efficiency.conv" not in fit.changed
    assert fit.machine.device.efficiency["conv"] == BASE.device.efficiency["conv"]
    every = tuple(op.label for op in ops)
    with pytest.raises(PaseError, match="only 0 products and 0 light ops"):
        calibrate_card(BASE, SimulatedCard(machine=BASE, broken=every), ALONE, 60, lambda *_: None)
    with pytest.raises(PaseError, match=r"no \[device.products\]"):
        calibrate_card(load("tpu_v5e"), SimulatedCard(machine=BASE), ALONE, 60, lambda *_: None)


@pytest.mark.data("gpu_h100/ops.csv")
def test_a_recorded_h100_is_predicted_from_a_wrong_file() -> None:
    """Starting from the figures of another card, ops that were not fitted are predicted near to the recorded times."""
    card = recorded_card(SHARED / "gpu_h100" / "ops.csv")
    fit = calibrate_card(other_card(), card, ALONE, 60, lambda *_: None, ops=card.ops, now=card.now)
    apart = [abs(t.predicted_s / t.measured_s - 1) for t in fit.timed if not t.fitted]
    before = [abs(t.before_s / t.measured_s - 1) for t in fit.timed if not t.fitted]
    assert len(fit.timed) == 60 and len(apart) >= 10
    assert statistics.median(apart) < 0.08 < 0.3 < statistics.median(before)
