"""The search is never worse than the baselines, under the same cost model and meshes."""

import pytest

from pase import costmodels, machine, zoo
from pase.baselines import Baseline, Skipped, baselines, names, price
from pase.baselines.fill_in import cost_of
from pase.search import solve
from pase.tables.build import build
from tests.baselines.helpers import graph_of

H100 = machine.load("h100x8")
# The same structure as gpt2 and gpt2_xl.
MODELS = [name for name in zoo.names() if name not in ("gpt2_medium", "gpt2_large")]


CASES = [(name, devices) for name in MODELS for devices in (8, 32)] + [("gpt2", 64), ("mixtral_8x7b", 64)]


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "devices"), CASES)
def test_search_is_never_worse(name, devices):
    graph, model = graph_of(name), costmodels.get("analytic", H100)
    built = {}

    def tables_of(mesh):
        if mesh.sizes not in built:
            built[mesh.sizes] = build(graph, mesh, model)
        return built[mesh.sizes]

    found = baselines(graph, devices, H100, model, tables_of=tables_of)
    made = [b for b in found if isinstance(b, Baseline)]
    assert {"data_parallel", "fsdp"} <= {b.name for b in made}
    searched = {sizes: solve(tables) for sizes, (tables, _) in built.items()}
    ours = min(s.cost for s in searched.values())
    for b in made:
        assert b.mesh.devices == devices
        tables, space = built[b.mesh.sizes]
        # KeyError if a config is not in the space; the cost must equal that of the tables.
        assert cost_of(tables, space.index(b.strategy)) == pytest.approx(b.cost, rel=1e-12)
        assert searched[b.mesh.sizes].cost <= b.cost * (1 + 1e-12), b.name
        assert ours <= b.cost * (1 + 1e-12), b.name


def test_every_method_answers_or_says_why():
    model = costmodels.get("analytic", H100)
    for name in ("alexnet", "gpt2"):
        found = baselines(graph_of(name), 32, H100, model)
        for method in names():
            mine = [b for b in found if b.name.split("_")[0] == method.split("_")[0]]
            assert mine, f"{method} gives no result for {name}"
        assert all(b.reason for b in found if isinstance(b, Skipped))
        assert len({b.name for b in found}) == len(found)


@pytest.mark.parametrize("where", ["tpu_v5e", "1080tix8"])
def test_priced_alike_from_scratch(where):
    m = machine.load(where)
    for cost_model in ("analytic", "paper"):
        model = costmodels.get(cost_model, m)
        for b in baselines(graph_of("alexnet"), 32, m, model):
            if isinstance(b, Baseline):
                assert price(graph_of("alexnet"), b, model) == pytest.approx(b.cost, rel=1e-12)


def test_unknown_method():
    with pytest.raises(ValueError) as e:
        baselines(graph_of("mlp"), 8, H100, costmodels.get("analytic", H100), only=("ddp",))
    assert "ddp" in e.value.what and "data_parallel, expert, fsdp" in e.value.fix
