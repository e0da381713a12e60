"""PyTorch's public APIs on a plan's DTensors: optimizers, clipping, and checkpoints that are loaded under another plan;
also compiled steps. Two Gloo processes in float64 are compared with one process without pase."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bench.cases.torch_ranks import on_processes
from tests.backends.torch.storage_ranks import RANKS, run

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_processes(RANKS, partial(run, tmp_path_factory.mktemp("state")), "forkserver", seconds=300)


def test_optimizers_update_as_without_a_plan(found: list[dict[str, Any]]) -> None:
    assert all(apart < 1e-12 for rank in found for apart in rank["optimizers"].values()), found[0]


def test_the_norm_of_gradients_is_that_of_the_whole_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for made in rank["clipped"].values():
            assert made["was"] > 0.05  # there is something to clip
            assert made["norm"] < 1e-12 and made["gradients"] < 1e-12


def test_gradients_are_scaled_and_the_whole_state_is_gathered_on_rank_0(found: list[dict[str, Any]]) -> None:
    assert all(apart < 1e-12 for rank in found for apart in rank["scaled"].values()), found[0]


def test_a_checkpoint_is_loaded_under_another_plan(found: list[dict[str, Any]]) -> None:
    assert all(apart < 1e-12 for rank in found for apart in rank["checkpoint"].values()), found[0]


def test_a_compiled_step_gives_the_same_numbers(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for made in rank["compiled"].values():
            assert made["loss"] < 1e-12 and made["gradients"] < 1e-12, rank["compiled"]


def test_a_first_reader_without_a_gradient_takes_it_from_no_other(found: list[dict[str, Any]]) -> None:
    assert all(rank["unwatched"] < 1e-12 for rank in found), found[0]["unwatched"]


def test_what_is_not_compiled_is_said(found: list[dict[str, Any]]) -> None:
    random, forward, backend = found[0]["refused"]
    assert "compile=False" in random["fix"]
    assert forward["where"] == "step(*batch)" and "step.backward" in forward["fix"]
    assert backend["where"] == "compile" and "'fast'" in backend["what"]


def test_a_rank_keeps_its_parts_alone_and_can_be_copied(found: list[dict[str, Any]]) -> None:
    """A part that is a view would keep the whole parameter in memory, and ``copy.deepcopy`` (an averaged model) refuses
    a DTensor with an offset. The first rank's views have none."""
    for rank in found:
        for made in rank["stored"].values():
            assert made["kept"] == made["bytes"] > 0 and made["copied"] == 0
