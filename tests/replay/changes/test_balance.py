"""The knob "balance": no rank is later or slower than the median rank."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay import align, load, measure
from pase.replay.changes.whatif import _cut, apply
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.reports.trust import Run


def test_balance_takes_no_noise_away(tmp_path: Path) -> None:
    """For even ranks, balancing must not take the shorter time of each task (1.1% less for two ranks with 2% noise).

    It only removes the wait for the rank whose noise adds up to more.
    """
    even: dict[str, Any] = {
        "ranks": 2,
        "iterations": 16,
        "noise": 0.02,
        "kernel_us": 200.0,
        "between_us": 4.0,
    }
    run = Run(measured=measure(align(load(write(simulate(ImaginedRun(**even)), tmp_path)))))
    balanced = run.changed_ns(apply(run.graph, [("balance", "", 1.0)]))
    assert run.replayed_ns * 0.992 < balanced <= run.replayed_ns


def test_ranks_that_are_late_in_turn_get_no_advice_about_one_of_them(tmp_path: Path) -> None:
    base: dict[str, Any] = {"ranks": 4, "iterations": 16, "layers": 4, "noise": 0.02, "chance_us": 3_000.0}
    more = {"kernel_us": 200.0, "between_us": 4.0, "bandwidth_bytes_per_us": 6000.0}
    late = simulate(ImaginedRun(**base | more))
    found = diagnose_run(measure(align(load(write(late, tmp_path))))).findings
    turns = next(f for f in found if f.kind == "imbalance")
    assert "in turn" in turns.title and "No rank is much later than the others" in turns.detail
    sent = next(f for f in found if f.kind == "exposed-communication")
    assert re.search(r"all_reduce \(\d of \d, [\d.]+ MiB\)", sent.detail)


def test_a_sum_is_cut_to_what_is_allowed_and_no_time_becomes_longer() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(1, 8))
        own, usual = random.exponential(size=n), random.exponential(size=n) * (random.random(n) < 0.8)
        total = float(own.sum() * random.random())
        cut = _cut(own, usual, total)
        assert (cut <= own + 1e-12).all() and (cut[usual == 0] == 0).all()
        assert cut.sum() == pytest.approx(min(total, own[usual > 0].sum()))
