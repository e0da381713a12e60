"""A frontend, a backend, a cost model, a pipeline schedule and a command each need one new file, which is found
automatically. A frontend's file is in its own folder."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

import pase
from pase import cli, costmodels
from pase.backends.registry import BACKENDS, Backend, emit
from pase.costmodels.registry import COST_MODELS
from pase.errors import PaseError
from pase.frontends.registry import FRONTENDS, coverage
from pase.pipeline.registry import SCHEDULES, schedule
from pase.registry import PLUGINS, import_plugins

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
FRONTEND = """
from pase.frontends.registry import FRONTENDS, Frontend, Traced, check_dims
from pase.ir import functions
from pase.ops import GraphBuilder, nests

def reads(model):
    return type(model).__name__ == "Recipe"

def trace(model, *args, name=None, unknown="error", dims=None):
    check_dims(dims, (), "recipe")
    b = GraphBuilder(name=name or "recipe")
    spice, dish = b.parameter("spice", model.shape, "float32"), b.input("dish", model.shape, "float32")
    (mixed,) = nests.elementwise(b, functions.MUL, [spice, dish], ["float32"])
    (taste,) = nests.reduce(b, functions.SUM, [mixed], (0, 1), ["float32"])
    b.output(taste)
    return Traced(graph=b.finish([taste], frontend="recipes"), param_paths=("spice",), input_paths=("dish",))

FRONTENDS.add("recipes", Frontend(reads=reads, trace=trace, coverage=lambda: {"elementwise": ["mix"]}))
"""
SCHEDULE = """
from pase.pipeline.registry import register
from pase.pipeline.schedules.flush import gpipe

register("mine", "as gpipe", source="this test")(gpipe)
"""
COMMAND = """
def greet(name: str) -> None:
    '''Say hello.'''
    print("hello", name)
"""


@pytest.fixture
def new_file(tmp_path, monkeypatch):
    """Adds a module to a package of pase for one test, from a file in a temporary folder."""
    added = []

    def add(package: str, name: str, source: str) -> None:
        file = tmp_path / f"{name}.py"
        if file.parent != tmp_path:
            file.parent.mkdir()
            (file.parent / "__init__.py").touch()
        file.write_text(source)
        of = importlib.import_module(package)
        monkeypatch.setattr(of, "__path__", [*of.__path__, str(tmp_path)])
        parts = name.split("/")
        added.extend(".".join([package, *parts[: i + 1]]) for i in range(len(parts)))

    yield add
    for module in added:
        sys.modules.pop(module, None)


def rediscovered(registry, monkeypatch) -> None:
    """Make a registry discover its members again, as in a new process. The test's end restores its present members."""
    list(registry)
    for discovered in ("_found", "_done"):
        monkeypatch.setattr(registry, discovered, False)
    monkeypatch.setattr(registry, "_members", dict(registry._members))


def test_a_backend(new_file, monkeypatch, tmp_path):
    rediscovered(BACKENDS, monkeypatch)
    new_file("pase.backends.emit", "prose", BACKEND)
    plan = pase.compile("zoo:mlp", devices=2, machine="h100x8")
    emit(plan, "prose", tmp_path / "plan.txt")
    assert (tmp_path / "plan.txt").read_text() == "zoo:mlp on 2 devices"
    assert BACKENDS["prose"].writes == "a sentence"
    with pytest.raises(ValueError, match="backend 'prose' is registered twice"):
        BACKENDS.add("prose", Backend(writes="again", emit=BACKENDS["prose"].emit))


def test_a_module_of_the_users_own(monkeypatch, tmp_path):
    """It adds a backend without a file in pase's folders, and every command has it."""
    rediscovered(BACKENDS, monkeypatch)
    (tmp_path / "prose_of_mine.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PLUGINS, "prose_of_mine")
    assert "prose" in BACKENDS and "fsdp2" in BACKENDS
    monkeypatch.setenv(PLUGINS, "prose_of_thine")
    with pytest.raises(PaseError, match="no module 'prose_of_thine'"):
        import_plugins()


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


class Recipe:
    """A model of a framework that pase does not know."""

    shape = (64, 32)


def test_a_frontend(new_file, monkeypatch):
    """Models of the new frontend are compiled, and ``pase ops`` lists its ops."""
    rediscovered(FRONTENDS, monkeypatch)
    new_file("pase.frontends", "recipes/frontend", FRONTEND)
    assert coverage()["recipes"] == {"elementwise": ["mix"]}
    plan = pase.compile(Recipe(), devices=4, machine="h100x8")
    assert plan.cost > 0 and [*plan.parameters] == ["spice"] and [*plan.inputs] == ["dish"]
    assert plan.parameters["spice"].shape == Recipe.shape
    with pytest.raises(PaseError, match="'salt'"):
        pase.compile(Recipe(), devices=4, machine="h100x8", dims={"salt": 2})


def test_a_schedule_of_a_pipeline(new_file, monkeypatch):
    rediscovered(SCHEDULES, monkeypatch)
    new_file("pase.pipeline.schedules", "mine", SCHEDULE)
    mine, theirs = (schedule(name, 2, 4) for name in ("mine", "gpipe"))
    assert str(mine) == str(theirs)


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
