"""Plans as PyTorch's own parallel styles. A plan that does not have a style is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pase.backends.registry import emit
from pase.errors import PaseError
from tests.backends.emit.torch_plans import plan_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("strategy", "target", "what"),
    [
        ("data_parallel", "fsdp2", "shards neither parameters"),
        ("megatron/megatron_1x4", "fsdp2", "does not split the batch"),
        ("fsdp", "tp-plan", "do not split the batch"),
        ("megatron/megatron_1x4", "torchtitan", "all_reduce over model"),
        ("random1@2x2", "fsdp2", "FSDP2"),
        ("random1@2x2", "tp-plan", "tp_plan"),
    ],
)
def test_another_way_of_splitting_is_refused(strategy: str, target: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(PaseError) as e:
        emit(plan_of("tower", strategy), target, tmp_path / "out")
    assert what in e.value.what and e.value.fix
    assert not (tmp_path / "out").exists()
