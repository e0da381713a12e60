"""Traces of compiled XLA programs: collectives under any name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pase.replay.traces.xla import describe
from pase.replay.types import COLLECTIVE, OPERATIONS, Event, from_events
from tests.replay.traces.compiled import facts_of_step


def test_a_collective_is_one_whatever_jax_calls_it() -> None:
    """In a manual lowering, XLA's all-gather may be named all_gather.9, and must not count as compute."""
    facts = replace(facts_of_step(1), kinds={"all_gather.9": "all_gather"}, nbytes={"all_gather.9": 64})
    event: dict[str, Any] = {"rank": 0, "lane": "XLA ops", "device": True, "kind": "kernel", "duration_ns": 5}
    t = describe(
        from_events([Event(name=n, start_ns=k, **event) for k, n in enumerate(("dot", "all_gather.9"))]),
        facts,
    )
    assert t["kind"].tolist()[1] == COLLECTIVE and t["kind"].tolist()[0] != COLLECTIVE
    assert OPERATIONS[int(t["operation"][1])] == "all_gather" and t["nbytes"][1] == 64 and t["group"][1] >= 0
