"""The program of a rank as code to read."""

from __future__ import annotations

import pytest

from tests.backends.torch.models import case

pytestmark = pytest.mark.torch


def test_the_code_names_parameters_layers_and_messages() -> None:
    """It needs no process group. The ranks of a group have different programs only where they differ."""
    c = case("tower", 4)
    plan = c.case.plan("megatron/megatron_2x2")
    assert plan is not None
    first, last = (plan.torch.code(rank=r) for r in (0, 3))
    compile(first, "rank 0", "exec")
    assert first.splitlines()[0].startswith("# ") and "rank 0 of 4" in first
    for name, _ in c.module.named_parameters():
        assert name.replace(".", "_") in first
        assert f"    # {name.rpartition('.')[0]}\n" in first
    assert "gradient_all_reduce" in first and "all_reduce" in first
    assert "rank 3 of 4" in last
