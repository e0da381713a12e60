"""Reshards of a rank's local tensors."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks

pytestmark = pytest.mark.torch


def test_what_an_axis_holds_may_go_to_places_that_overlap() -> None:
    """A reshard between parts that do not nest is one collective, and every element arrives where the layout has it.
    Here, an axis of size four changes from one digit of a dim to another that overlaps with it."""
    import torch

    from pase.backends.audit.torch import recorded
    from pase.backends.torch.spmd.process_groups import axis_groups
    from pase.local.parts import NotNested, digits, held
    from pase.local.reshard import resharded
    from pase.local.types import LocalReshardStep
    from pase.machine import Mesh
    from pase.tables.axis_layout import AxisLayout

    mesh, shape = Mesh(names=("x",), sizes=(4,)), (16, 3)
    high, low = AxisLayout([(0, 4)]), AxisLayout([(0, 8)])
    with pytest.raises(NotNested):
        digits(shape, high, low, mesh)
    whole = torch.arange(48.0).reshape(shape)

    def on_rank(rank: int) -> Any:
        groups = axis_groups(mesh, [("x",)], "cpu")
        mine = {s: whole[torch.from_numpy(held(shape, s, (rank,), mesh)[0])] for s in (high, low)}
        out = []
        with recorded(groups) as found:
            for before, after in ((high, low), (low, high)):
                move = LocalReshardStep(kind="all_to_all", axes=("x",), before=before, after=after, nbytes=48)
                out.append(torch.equal(resharded(mine[before], [move], shape, "sum", groups), mine[after]))
        return out, dict(found.sent)

    for same, sent in on_ranks(4, on_rank):
        assert same == [True, True]
        assert sent == {("all_to_all", ("x",), 48): 2}
