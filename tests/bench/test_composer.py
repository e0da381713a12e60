"""The composer of programs: its text, its shrinking, its rows; and that the programs of some seeds agree."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from bench.composer.jax_runs import attempt
from bench.composer.maker import LAYERS, LOSSES
from bench.composer.runner import counted, ended
from bench.composer.spec import parse

LINE = "8,4,16 glu.3 attention.1! | cross_entropy.2 @ default/auto/sgd random1@2x2/manual/adam"


def test_a_program_is_a_line_and_the_line_is_the_program():
    assert str(parse(LINE)) == LINE
    assert parse(LINE).parts[1].plain and not parse(LINE).loss.plain


def test_smaller_programs_have_less_in_them():
    smaller = list(map(str, parse(LINE).smaller()))
    assert "8,4,16 glu.3 attention.1! | cross_entropy.2 @ default/auto/sgd" in smaller
    assert any(" glu" not in text for text in smaller) and any("mean_square" in text for text in smaller)
    assert LINE not in smaller


def test_a_program_ended_as_the_worst_of_its_ways():
    ends = {
        "default/auto/sgd": {"end": "agrees"},
        "random1@4/auto/sgd": {"end": "wrong", "message": "loss 0"},
    }
    row = {"program": LINE, "patterns": ["glu", "weight:exp"], "ends": ends}
    assert ended(row) == "wrong"
    found = counted({"7": row})
    assert found["ends"] == {"wrong": 1} and found["patterns"]["weight:exp"] == {"wrong": 1}
    assert found["ways"] == {"default": {"agrees": 1}, "random": {"wrong": 1}}
    assert list(found["not agreeing"]) == ["7"]


FOUND = [
    # jnp.diagonal, evaluated whole on a part of its operand
    "8,4,8 | contrastive.10478! @ default/auto/adam",
    # a view of a parameter that merges dims, whose gradient is split by the state
    "16,8,16 bilinear.44727 | mean_square.0! @ random916@2x2x2/auto/sgd",
    # a conditional whose branches had unlike shardings
    "8,8,8 | cross_entropy.22680 @ random366@2x2/annotated/sgd",
    # a maximum over an axis of vmap, of a device's part alone
    "8,4,8 mapped_collectives.12! | mean_square.1! @ random2@2x2/manual/sgd",
    # a depthwise convolution annotated, an axis idle: XLA doubles the filter's gradient
    "8,4,8 convolutions.0! | mean_square.1! @ random58@2x2/annotated/sgd",
    # a scheduled step whose weight has a derivative rule of its own
    "8,6,8 latents.49185 | mean_square.0! @ scheduled/manual/sgd",
]
"""Programs that were wrong or refused by XLA."""


@pytest.mark.parametrize("line", FOUND)
def test_programs_that_failed_agree(line):
    with jax.enable_x64(True):
        row = attempt(parse(line))
    assert [e["end"] for e in row["ends"].values()] == ["agrees"], row


CHEAP = (Path(__file__).parent / "composed_programs.txt").read_text().splitlines()
"""Programs chosen for what they cost and hold: between them every pattern, every transform of weights, every optimizer
and every way to run a step."""
CHUNK = 10


@pytest.mark.some(1)
@pytest.mark.parametrize("first", range(0, len(CHEAP), CHUNK))
def test_composed_programs_agree(first: int) -> None:
    with jax.enable_x64(True):
        rows = [attempt(parse(line)) for line in CHEAP[first : first + CHUNK]]
    off = {row["program"]: row["ends"] for row in rows if ended(row) != "agrees"}
    assert not off, off


def test_the_composed_programs_have_every_pattern() -> None:
    found = [parse(line) for line in CHEAP]
    assert {p.pattern for s in found for p in s.parts} >= LAYERS.keys()
    assert {s.loss.pattern for s in found} >= LOSSES.keys()
