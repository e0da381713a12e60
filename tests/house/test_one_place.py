"""A backend, a cost model, a command: each is one new file, found by itself, and no name is given twice."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

import pase
from pase import cli, costmodels
from pase.backends.registry import BACKENDS, Backend, emit
from pase.costmodels.registry import COST_MODELS

BACKEND = """
from pase.backends.registry import BACKENDS, Backend

def write(plan, path, *, model):
    path.write_text(f"{model} on {plan.mesh.devices} devices")
    return f"{path} written"

BACKENDS.add("prose", Backend(writes="a sentence", emit=write))
"""
COST_MODEL = """
from pase.costmodels.analytic import Analytic
from pase.costmodels.registry import register

@register("twice")
class Twice(Analytic):
    def compute(self, *args, **kwargs):
        return 2 * super().compute(*args, **kwargs)
"""
COMMAND = """
def greet(name: str) -> None:
    '''Say hello.'''
    print("hello", name)
"""


@pytest.fixture
def new_file(tmp_path, monkeypatch):
    """Puts a module into a package of pase for one test, as a file in a folder of its own."""
    added = []

    def add(package: str, name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        of = importlib.import_module(package)
        monkeypatch.setattr(of, "__path__", [*of.__path__, str(tmp_path)])
        added.append(f"{package}.{name}")

    yield add
    for module in added:
        sys.modules.pop(module, None)


def rediscovered(registry, monkeypatch) -> None:
    """As in a new process, in which nothing has been asked for yet."""
    for discovered in ("_found", "_done"):
        monkeypatch.setattr(registry, discovered, False)
    monkeypatch.setattr(registry, "_members", dict(registry._members))


def test_a_backend(new_file, monkeypatch, tmp_path):
    rediscovered(BACKENDS, monkeypatch)
    new_file("pase.backends", "to_prose", BACKEND)
    plan = pase.compile("zoo:mlp", devices=2, machine="h100x8")
    emit(plan, "prose", tmp_path / "plan.txt")
    assert (tmp_path / "plan.txt").read_text() == "zoo:mlp on 2 devices"
    assert BACKENDS["prose"].writes == "a sentence"
    with pytest.raises(ValueError, match="backend 'prose' is registered twice"):
        BACKENDS.add("prose", Backend(writes="again", emit=BACKENDS["prose"].emit))


def test_a_cost_model(new_file, monkeypatch):
    rediscovered(COST_MODELS, monkeypatch)
    new_file("pase.costmodels", "twice", COST_MODEL)
    assert "twice" in costmodels.names()
    once, twice = (
        pase.compile("zoo:mlp", devices=1, machine="h100x8", cost_model=m) for m in ("analytic", "twice")
    )
    assert twice.cost == pytest.approx(2 * once.cost)
    with pytest.raises(ValueError, match="cost model 'twice' is registered twice"):
        costmodels.register("twice")(object)


def test_a_command(new_file, capsys):
    new_file("pase.commands", "greet", COMMAND)
    for args, said in (
        (["greet", "you"], "hello you"),
        (["--help"], "Say hello."),
        (["zoo", "--json"], None),
    ):
        with pytest.raises(SystemExit) as left:
            cli.command_group().main(args=args, prog_name="pase")
        assert left.value.code == 0
        out = capsys.readouterr().out
        assert said in out if said else json.loads(out)
