"""``pase price``."""

from __future__ import annotations

import pytest

import pase
from tests.command import printed, reported, run

MODEL = "zoo:llama3_8b?batch=8&seq=256&layers=2&vocab=512"
GIVEN = (MODEL, "--devices", 4, "--as", "fsdp=2,tp=2")


def test_it_prints_what_the_library_prices() -> None:
    said = reported("price", *GIVEN)
    assert said.pop("model") == MODEL
    assert said == pase.price(MODEL, devices=4, strategy="fsdp=2,tp=2").to_json()


def test_the_executor_changes_the_price() -> None:
    assert reported("price", *GIVEN, "--executor", "eager") != reported("price", *GIVEN)


def test_a_strategy_that_makes_no_sense_is_refused() -> None:
    code, out, error = run("price", MODEL, "--devices", 4, "--as", "tp=3")
    assert code != 0 and out == "" and error.startswith("Error: ")


def test_one_strategy_has_one_price_in_both_commands() -> None:
    small = "zoo:gpt2?batch=4&layers=2&seq=16&vocab=64"
    given = "price", small, "--devices", 2, "--as", "fsdp=2"
    assert "prices this split as fsdp, with" in " ".join(printed(*given).split())
    said = reported(*given, "--like-search")
    rows = {row["name"]: row for row in reported("compare", small, "--devices", 2)["strategies"]}
    assert said["like_search"]["step_s"] == rows["fsdp"]["cost_s"]
    assert said["like_search"]["memory_bytes"] == rows["fsdp"]["memory_bytes"]
    more = said["like_search"]["longer_here_s"]
    assert sum(more.values()) == pytest.approx(said["step_s"] - rows["fsdp"]["cost_s"])
    assert [term.split("=")[0] for term in said["added"]] == ["micro", "remat", "zero"]
