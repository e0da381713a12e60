"""Where parameters stand among the stages: tables that both ends read."""

from __future__ import annotations

from dataclasses import replace

from tests.compiler.stages.staged import tables_of


def test_tied_tables_are_summed_between_the_ends():
    t = tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4)
    assert t.places.tied == ("wte",)
    assert replace(t.places, parts={}).tied == ()
