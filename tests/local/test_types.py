"""What a local program says about its tensors, transfers and partial results."""

from pase.local.types import LocalResult
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from tests.local.programs import planned_program


def test_copies_are_told_from_what_they_copy():
    """Every operand is a use of one tensor of the traced program, and a transfer of a copy starts from the copy's."""
    _, local = planned_program("gpt2", "random1@2x4")
    uses = [(t, op, o) for t, found in local.uses.items() for op, o in found]
    assert len(uses) == sum(len(op.operands) for op in local.ops)
    assert all(local.original(o.tensor) == t and o in op.operands for t, op, o in uses)
    of_copies = [k for k, t in enumerate(local.transfers) if t.tensor in local.originals]
    assert of_copies and not set(local.originals) & {*local.uses}
    for k in range(len(local.transfers)):
        before = local.before(k)
        assert (before is not None) == (k in of_copies)
        if before is not None:
            assert local.transfers[before].tensor == local.originals[local.transfers[k].tensor]


def test_partial_results_are_reduced_at_once_or_by_the_edge():
    mesh = Mesh(names=("a", "b", "c"), sizes=(2, 2, 2))
    result = LocalResult(
        tensor="y",
        shape=(4,),
        layout=AxisLayout([None, "partial", (0, 2)]),
        gradient=AxisLayout.whole(mesh),
        summed=("a",),
    )
    assert result.partial_over(mesh) == ("a", "b")
