"""Aligns, replays, diagnoses and optimizes traces of a distributed run.

t = align(load("traces"))          # one timeline with a common clock
m = measure(t)                     # the program of each rank and iteration
g = estimate(m, m.steady())        # a graph that predicts one iteration
replay_graph(g).makespan_ns
"""

from __future__ import annotations

import importlib
from typing import Any

from pase.former import former_names

__all__ = [
    "Event",
    "Timeline",
    "align",
    "diagnose_run",
    "estimate",
    "held_out",
    "load",
    "measure",
    "optimize_graph",
    "profile",
    "replay_graph",
    "schema",
]

_HOMES = {
    "Event": "types",
    "Timeline": "types",
    "align": "measurement.clocks",
    "diagnose_run": "reports.diagnose",
    "estimate": "measurement.model",
    "held_out": "simulation.predict",
    "load": "traces.ingest",
    "measure": "measurement.model",
    "optimize_graph": "changes.optimize",
    "profile": "collect.profiling",
    "replay_graph": "simulation.simulate",
    "schema": "traces.timeline_io",
}

former_names(
    __name__,
    {
        "clocks": "measurement.clocks",
        "diagnose": "reports.diagnose",
        "model": "measurement.model",
        "report": "reports.report",
        "streams": "reports.streams",
    },
)


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that importing the package does not load numba and the parsers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pase.replay' has no attribute '{name}'")
    module = importlib.import_module(f"pase.replay.{_HOMES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value
