"""What ``pase.search.warm`` compiles ahead is what the search calls."""

from __future__ import annotations

import time

import numpy as np

from pase.search.bounded.search import bounded_search
from pase.search.types import Effort
from tests.search.bounded.instances import clique


def test_warm_compiles_what_the_search_calls() -> None:
    """A real search adds no signature to any kernel, so warming up leaves nothing to compile."""
    from pase.search.bounded import kernels_depth, kernels_flat, kernels_memory
    from pase.search.warm import warm

    warm()
    called = (
        *(kernels_memory.dual_ascent, kernels_memory.polish, kernels_memory.lns),
        *(kernels_flat.trws_pass, kernels_depth.descend),
    )
    before = [len(kernel.signatures) for kernel in called]
    bounded_search(
        clique(np.random.default_rng(2), nodes=20, configs=10),
        None,
        Effort(rounds=2),
        0,
        time.perf_counter(),
    )
    assert [len(kernel.signatures) for kernel in called] == before
