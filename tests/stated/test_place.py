"""Stated strategies as configs of every node."""

from __future__ import annotations

import pytest

from pase import zoo
from pase.baselines import baselines
from pase.errors import Infeasible
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.stated.place import place
from pase.stated.strategy import parse
from pase.tables.itemize import collectives
from tests.stated.prices import GRAPH, H100, MODEL


def test_tensor_parallelism_is_megatron_s_own_strategy():
    """It has the same collectives as the baseline, which a search over the same rules finds."""
    for text, name in (("dp=2,tp=4", "megatron_2x4"), ("dp=2,tp=4,sp", "megatron_sp_2x4")):
        s = parse(text, 8)
        (known,) = baselines(GRAPH, 8, H100, MODEL, only=(name,))
        mine = place(GRAPH, s, MODEL)
        assert mine.mesh.sizes == known.mesh.sizes
        assert mine.cost == pytest.approx(known.cost)

        def sent(b):  # type: ignore[no-untyped-def]
            found = collectives(GRAPH, b.mesh, b.strategy, MODEL)
            return sorted((c.kind, c.nbytes, c.times, c.phase) for c in found)

        assert sent(mine) == sent(known)


def test_only_products_with_experts_own_weights_are_split_over_experts():
    """Routing, dispatch and combination have an expert dim too, but split over it they need the tokens of all."""
    m = zoo.get("mixtral_8x7b", batch=32, layers=2, seq=64, vocab=128)
    graph = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
    mine = place(graph, parse("dp=16,ep=8", 16), MODEL)
    (known,) = baselines(graph, 16, H100, MODEL, only=("expert_2x8",))
    for b in (mine, known):
        found = collectives(graph, b.mesh, b.strategy, MODEL)
        kinds = {c.kind for c in found if c.phase == "forward" and "expert" in c.axes}
        assert kinds == {"all_to_all", "all_reduce"}  # the latter of the loss
    assert mine.cost == pytest.approx(known.cost)


@pytest.mark.parametrize(
    ("text", "devices", "says"),
    [
        ("dp=32", 32, "none of its batch dims"),
        ("tp=11", 11, "heads, hidden units"),
        ("ep=2,dp=2", 2, "expert dims"),
    ],
)
def test_what_cannot_be_split_so_says_why(text, devices, says):
    with pytest.raises(Infeasible, match=says):
        place(GRAPH, parse(text, devices), MODEL)
