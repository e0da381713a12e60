"""The account of memory that a machine's compiler has."""

from __future__ import annotations

from dataclasses import replace

import pase
from pase import machine


def test_a_limit_holds_by_the_compilers_account():
    """On a machine that fuses, a limit at the course's peak changes nothing, and a tighter one is met."""
    small = "zoo:gpt2?layers=2&batch=32&vocab=4096&remat=0"
    v5e = machine.load("tpu_v5e")
    fused, summed = (
        pase.compile(small, devices=4, mesh="4", machine=replace(v5e, fuses_products=f), baselines=False)
        for f in (True, False)
    )
    assert fused.cost < summed.cost  # nothing is converted in memory, and norms are not kernels of their own
    assert fused.memory.total < summed.memory.total
    for part in (1.0, 0.8):
        limit = part * fused.memory.total
        tight = pase.compile(
            small, devices=4, mesh="4", machine="tpu_v5e", memory_limit=limit, baselines=False
        )
        assert tight.memory.total <= limit and tight.bound <= tight.cost
        assert (tight.cost == fused.cost) == (part == 1.0)
