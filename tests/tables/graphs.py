"""The machine and graphs for which tables are tested."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import load

MACHINE = machine.load("h100x8")
MODEL = costmodels.get("analytic", MACHINE)


def graph(name: str) -> Graph:
    m = zoo.get(name)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


TPU = machine.load("tpu_v5e")
TILE = (8, 128)


def block(seq: int) -> Graph:
    m = zoo.get(f"bert_base?seq={seq}&layers=2&batch=32")
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


def untiled() -> machine.Machine:
    return dataclasses.replace(TPU, device=dataclasses.replace(TPU.device, memory_tile=()))


HERE = load("h100x8")
CPU = replace(HERE, bucket_bytes=0.0, sums_readers=False, sources={**HERE.sources, "bucket_bytes": "test"})
