"""Stated strategies and the rows of the comparison that split a model in the same way."""

from __future__ import annotations

import math

import pytest

from pase.baselines import Intent, Skipped
from pase.baselines.rules import RULES
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.errors import Infeasible
from pase.stated.searched import baseline_of, price_like_search
from pase.stated.strategy import parse

MODEL = "zoo:gpt2?batch=16&layers=1&seq=64&vocab=256"


@pytest.fixture(scope="module")
def rows() -> dict[str, Intent | Skipped]:
    """What the rules of the comparison yield for 16 devices, by name, before anything is priced."""
    problem = SplitProblem.of(resolve(MODEL).graph, 16, "h100x8", "analytic", "adam")
    made = (row for rule in RULES.values() for row in rule(problem.graph, 16, problem.machine))
    return {row.name: row for row in made}


@pytest.mark.parametrize(
    "strategy",
    [
        "dp=16",
        "dp=16,zero=2",
        "fsdp=16",
        "dp=2,fsdp=8",
        "tp=2",
        "tp=2,sp",
        "fsdp=4,tp=4,sp",
        "dp=8,zero=2,tp=2,sp",
    ],
)
def test_every_strategy_that_people_state_has_its_row(
    strategy: str, rows: dict[str, Intent | Skipped]
) -> None:
    s = parse(strategy, 16)
    row = rows[baseline_of(s) or ""]
    assert isinstance(row, Intent) and row.mesh.devices == s.devices
    model = [size for name, size in row.mesh.by_name.items() if name.startswith("model")]
    assert math.prod(model) == s.tensor


@pytest.mark.parametrize("strategy", ["pp=2", "tp=2,cp=2", "fsdp=16,precision=fp8", "dp=16,zero=1"])
def test_a_split_without_a_row_is_refused(strategy: str) -> None:
    with pytest.raises(Infeasible, match="no row that splits the model in this way") as e:
        price_like_search(MODEL, None, (), CompileOptions(devices=16), parse(strategy, 16))
    assert "FSDP" in e.value.fix
