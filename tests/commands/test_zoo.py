"""``pase zoo``."""

from __future__ import annotations

import json

import pytest

from pase import zoo
from pase.commands.zoo import zoo as zoo_command


def test_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    zoo_command(json=True)
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in models] == list(zoo.names())
    gpt2 = next(model for model in models if model["name"] == "gpt2")
    assert gpt2["parameters"] == 124_439_808 and gpt2["settings"]["seq"] == 1024 and gpt2["source"]


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    zoo_command()
    printed = capsys.readouterr().out
    assert all(name in printed for name in zoo.names()) and "124,439,808" in printed
