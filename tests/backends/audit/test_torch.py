"""The collectives that are expected of a PyTorch step are those of the plan, apart from sums that are joined."""

from collections import Counter

import pytest

from tests.local.programs import planned_program


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("mlp", "data_parallel"), ("mlp", "fsdp"), ("mlp", "random1@2x4"), ("gpt2", "megatron/megatron_sp_2x4")],
)
def test_joining_sums_changes_no_bytes(model, strategy):
    """Sums over the same axes are joined to fewer all-reduces of as many bytes. All others are sent one by one."""
    from pase.backends.audit.torch import planned

    plan, program = planned_program(model, strategy)
    listed = Counter()
    for c in plan.collectives:
        if axes := tuple(a for a in c.axes if plan.mesh.sizes[plan.mesh.names.index(a)] > 1):
            listed[c.kind, axes, c.nbytes] += c.times
    found = planned(program)
    assert listed
    assert {k: n for k, n in found.items() if k[0] != "all_reduce"} == {
        k: n for k, n in listed.items() if k[0] != "all_reduce"
    }
    nbytes = [Counter() for _ in range(2)]
    for total, counts in zip(nbytes, (found, listed), strict=True):
        for (kind, axes, n), times in counts.items():
            total[kind, axes] += n * times
    assert nbytes[0] == nbytes[1]
    assert found.total() <= listed.total()
