"""Results of the corpus: each program has a row, nearly all agree, none aborts XLA, and outliers have reasons."""

from __future__ import annotations

import json

import pytest

from bench.programs.catalog import load
from bench.programs.outliers import REASONS, outliers, reason
from bench.runner import RESULTS

ROWS = json.loads((RESULTS / "programs.json").read_text())["programs"]
DONE = {name: row for name, row in ROWS.items() if row.get("stage") == "done"}


def test_every_program_has_a_row() -> None:
    assert sorted(load()) == sorted(ROWS)


def test_nearly_all_agree_and_none_ends_xla() -> None:
    right = [row["agrees"] or row.get("float64", {}).get("explained", False) for row in ROWS.values()]
    assert len(right) >= 200 and sum(right) >= 0.95 * len(right)
    assert not [name for name, row in ROWS.items() if "aborted" in row]


@pytest.mark.parametrize("name", DONE)
def test_what_is_far_from_xlas_count_has_a_reason(name: str) -> None:
    for figure in outliers(DONE[name]):
        assert reason(name, figure), f"{figure} is {DONE[name][figure]:.2f} of XLA's"


def test_every_reason_is_needed() -> None:
    """If an outlier is fixed, its reason must be removed."""
    used = {
        (figure, pattern)
        for name, row in DONE.items()
        for figure in outliers(row)
        for pattern in [reason(name, figure)[0]]
    }
    assert used == {(figure, pattern) for figure, patterns in REASONS.items() for pattern in patterns}
