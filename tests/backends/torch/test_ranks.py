"""Tests what is said of ranks that fail, die or hang when they run as processes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bench.cases.torch_ranks import on_processes

pytestmark = pytest.mark.torch


def each_in_its_way(rank: int) -> int:
    if rank == 1:
        raise ValueError("a rank's own words")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if rank == 3:
        time.sleep(600)
    return rank


def test_an_error_says_which_ranks_and_where() -> None:
    with pytest.raises(RuntimeError) as raised:
        on_processes(
            4, each_in_its_way, "forkserver", seconds=30
        )  # ranks that answer need seconds on a busy machine
    one, two, three = str(raised.value).split("rank ")[1:]
    assert "a rank's own words" in one
    assert "ended without an answer, with exit code -11" in two and "in each_in_its_way" in two
    assert "no answer in time" in three and "in each_in_its_way" in three
