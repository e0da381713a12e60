"""Collectives over the axes of a mesh. The oracle is numpy on the ranks' tensors together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.audit.torch_dispatch import dispatched
from bench.cases.torch_ranks import on_ranks
from pase.backends.torch.spmd.process_groups import AxisGroups, axis_groups
from pase.errors import PaseError
from pase.local.parts import held, view
from pase.local.reshard import resharded
from pase.local.types import LocalReshardStep
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout

MESH = Mesh(names=("x", "one", "y"), sizes=(2, 1, 3))
AXES = [("x",), ("y",), ("x", "y")]


def at(*place: int) -> AxisGroups:
    return AxisGroups(mesh=MESH, devices=None, place=place)  # type: ignore[arg-type]


def test_ranks_of_a_group_are_numbered_row_major() -> None:
    places = [(i, 0, k) for i in range(2) for k in range(3)]
    assert [at(*p).number(("x", "y")) for p in places] == list(range(6))
    assert [at(*p).number(("y", "x")) for p in places] == [0, 2, 4, 1, 3, 5]
    assert at(1, 0, 2).wide(("one", "y")) == ("y",) and at(1, 0, 2).ways(("x", "one", "y")) == 6
    assert at(1, 0, 2).index("y") == 2


def test_groups_and_sums_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PaseError, match="no process group over x, y"):
        at(0, 0, 0)._group(("x", "one", "y"))
    with pytest.raises(PaseError, match="only sums, maxima and minima") as e:
        at(0, 0, 0).all_reduce(None, ("x",), "other")  # type: ignore[arg-type]
    assert e.value.where == "the reduction over x"


@pytest.mark.torch
@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "int16", "uint16", "uint32", "float8_e4m3fn", "bfloat16", "complex64", "complex128"],
)
def test_what_is_sent_has_a_dtype_that_nccl_and_gloo_can_send(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo has no all-to-all of complex numbers, and neither library sends short integers."""
    import torch

    monkeypatch.setattr(AxisGroups, "_waited", staticmethod(lambda x: x))
    sent = []

    def send(wire: Any) -> Any:
        sent.append(wire.dtype)
        return wire.flip(0)

    x = torch.randn(4, 3, dtype=torch.complex64 if "complex" in dtype else torch.float32) * 9
    x = x.abs().to(getattr(torch, dtype)) if "complex" not in dtype else x.to(getattr(torch, dtype)).conj()
    assert torch.equal(at(0, 0, 0)._sent(x, send).flip(0).to(torch.complex128), x.to(torch.complex128))
    assert sent[0] in (torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.torch
def test_collectives_are_numpys_on_all_ranks() -> None:
    """[x, y, ways, 2] numbers: each group's ranks are an axis or both, and no rank outside of it takes part."""
    import torch

    given = {
        axes: np.random.default_rng(0).standard_normal(
            (2, 3, int(np.prod([MESH.by_name[a] for a in axes])), 2)
        )
        for axes in AXES
    }

    def on_rank(rank: int) -> Any:
        groups = axis_groups(MESH, AXES, "cpu")
        i, _, k = groups.place
        out = {}
        for axes, every in given.items():
            x = torch.from_numpy(every[i, k])
            out[axes] = (
                groups.all_reduce(x, axes),
                groups.all_reduce(x, axes, "max"),
                groups.all_gather(x, axes),
                groups.reduce_scatter(x, axes),
                groups.all_to_all(x, axes),
            )
        return (i, k), out

    for (i, k), out in on_ranks(6, on_rank):
        for axes, made in out.items():
            every = given[axes]
            group = {("x",): every[:, k], ("y",): every[i], ("x", "y"): every.reshape(6, *every.shape[2:])}[
                axes
            ]
            me = {("x",): i, ("y",): k, ("x", "y"): 3 * i + k}[axes]
            wanted = (group.sum(0), group.max(0), group, group.sum(0)[me], group[:, me])
            for mine, numpy in zip(made, wanted, strict=True):
                np.testing.assert_allclose(mine.numpy(), numpy, rtol=1e-14)


BOTH = ("x", "y")
MOVES: dict[str, tuple[LocalReshardStep, int]] = {
    f"{kind} {before} {after}": (
        LocalReshardStep(kind=kind, axes=axes, before=AxisLayout(before), after=AxisLayout(after), nbytes=8),  # type: ignore[arg-type]
        ops,
    )
    for kind, axes, before, after, ops in (
        ("all_gather", ("x",), ((0, 2), None, None), (None, None, None), 0),
        ("all_gather", ("x",), ((1, 2), None, (0, 3)), (None, None, (0, 3)), 2),
        ("all_gather", BOTH, ((2, 2), None, (2, 6)), (None, None, None), 2),
        ("all_gather", ("x",), ((1, 6), None, None), (None, None, None), 4),  # a digit behind others
        ("reduce_scatter", ("y",), (None, None, "partial"), (None, None, (0, 3)), 0),
        ("reduce_scatter", BOTH, ("partial", None, "partial"), ((1, 2), None, (1, 6)), 2),
        ("all_to_all", ("y",), (None, None, (0, 3)), (None, None, (2, 3)), 2),
        ("all_to_all", ("y",), ((0, 6), None, (1, 3)), ((0, 6), None, (0, 3)), 9),  # digits between others
        ("all_to_all", BOTH, ((1, 2), None, (1, 6)), ((2, 2), None, (2, 6)), 4),
        ("slice", ("x",), (None, None, None), ((1, 2), None, None), 1),
        ("slice", BOTH, (None, None, None), ((0, 2), None, (0, 6)), 1),
        ("slice", ("x",), (None, None, None), ((1, 6), None, None), 4),
    )
}


@pytest.mark.torch
@pytest.mark.parametrize("name", MOVES)
def test_parts_of_one_dim_move_with_two_ops_at_most(name: str) -> None:
    """Each rank gets its part of the whole; numbers and flags. The ops are those besides collectives and waits."""
    import torch

    step, most = MOVES[name]
    whole = np.random.default_rng(0).standard_normal((6, 12, 24))
    partial = "partial" in step.before

    def mine(layout: AxisLayout, place: tuple[int, ...]) -> np.ndarray:
        return np.ascontiguousarray(whole[np.ix_(*held(whole.shape, layout.summed, place, MESH))])

    def on_rank(rank: int) -> Any:
        groups = axis_groups(MESH, AXES, "cpu")
        x = torch.from_numpy(mine(step.before, groups.place))
        made: list[Any] = []
        ops = dispatched(lambda: made.append(resharded(x, [step], whole.shape, "sum", groups)))
        if not partial:
            made.append(resharded(x > 0, [step], whole.shape, "sum", groups))
        return groups.place, made, sum(n for op, n in ops.items() if "c10d" not in op)

    for place, made, count in on_ranks(6, on_rank):
        wanted = mine(step.after, place) * (np.prod([MESH.by_name[a] for a in step.axes]) if partial else 1)
        np.testing.assert_allclose(made[0].numpy(), wanted, rtol=1e-13)
        if not partial:
            assert (made[1].numpy() == (wanted > 0)).all()
        assert count <= most


@pytest.mark.torch
def test_the_last_dim_stays_dense_in_memory() -> None:
    """It did not where a rank had one element of it: PyTorch's attention then kept the scores, in silence."""
    import torch

    step = LocalReshardStep(
        kind="all_gather",
        axes=("y",),
        before=AxisLayout([None, None, (1, 3)]),
        after=AxisLayout([None] * 3),
        nbytes=24,
    )
    made = at(0, 0, 0).from_front(torch.arange(6.0).reshape(3, 2), view(step, (2, 3), MESH))
    assert made.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert made.stride() == (3, 1)


@pytest.mark.torch
def test_a_permutation_sends_each_part_to_one_rank_and_booleans_too() -> None:
    import torch

    def on_rank(rank: int) -> Any:
        groups = axis_groups(MESH, AXES, "cpu")
        flags = torch.tensor([rank % 2 == 0, True])
        moved = groups.permute(flags, ("x", "y"), [(r, (r + 1) % 6) for r in range(6)])
        return moved.dtype == torch.bool, moved.tolist()

    assert on_ranks(6, on_rank) == [(True, [(r - 1) % 6 % 2 == 0, True]) for r in range(6)]
