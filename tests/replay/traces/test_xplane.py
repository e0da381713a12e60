"""Profiler planes of XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pase.replay.collect.profiling import profile
from pase.replay.traces.ingest import load


@pytest.mark.parametrize("width", [32, 64])
def test_of_programs_with_one_name_the_one_that_ran_is_read(tmp_path: Path, width: int) -> None:
    """The profiler records all programs that the process compiled, so the first one of that name may not have run."""
    jax = pytest.importorskip("jax")

    def step(w: Any) -> Any:
        return w @ w

    made = {n: jax.jit(step).lower(jax.numpy.ones((n, n))).compile() for n in (32, 64)}
    w = jax.numpy.ones((width, width))
    with profile(tmp_path) as run:
        for _ in range(3):
            with run.step():
                jax.block_until_ready(made[width](w))
    (product,) = [op.product for op in load(tmp_path).compiled.values() if op.product]
    assert product == ((width, width),) * 3
