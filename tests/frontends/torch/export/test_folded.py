"""Folding of equal layers. The oracle is the graph that PyTorch traces layer by layer."""

from __future__ import annotations

import contextlib

import pytest

from pase.frontends.torch.export import module as torch_export
from pase.frontends.torch.export.folded import folding
from pase.frontends.torch.lower import reads_op
from tests.frontends.torch.export.layers import models, written

pytestmark = pytest.mark.torch


def programs(model, monkeypatch):
    """The program, the Folding of each attempt, and the program traced layer by layer."""
    import torch

    seen = []

    @contextlib.contextmanager
    def noted(module, paths, wanted):
        with folding(module, paths, wanted) as fold:
            seen.append(fold)
            yield fold

    x = torch.empty(4, 8)
    monkeypatch.setattr(torch_export, "folding", noted)
    ours = torch_export.program_of(model, (x,), None, reads_op)
    monkeypatch.setattr(torch_export, "folding", lambda module, paths, _: folding(module, paths, False))
    return ours, seen, torch_export.program_of(model, (x,), None, reads_op)


CALLS = {
    "plain": 4,
    "tuple": 4,
    "no_grad": 4,
    "constant": 4,
    "checkpoint": 4,
    "autocast": 4,
    "own writes": 4,
    "tied outside": 3,
    "frozen": 3,
    "eval": 3,
    "width": 3,
    "turns": 3,
    "shapes": 2,
    "mask": 2,
    "outer no_grad": 1,
    "sibling": 0,
    "is": 2,
    "half": 2,
    "third": 0,
    "exp": 0,
    "type": 0,
    "vmap": 0,
    "view": 0,
    "weight": 0,
    "once more": 0,
    "cond": 0,
    "tied inside": 0,
    "same": 0,
    "place": 0,
    "compares": 0,
    "format": 0,
    "writes": 0,
    "buffer": 0,
}
"""What the layers do -> how many of the seven layers are folded in the attempt that is used."""


@pytest.mark.some(16)
@pytest.mark.parametrize("kind", CALLS)
def test_folded_is_what_pytorch_traces(kind, monkeypatch):

    ours, (*_, fold), theirs = programs(models().Stack(kind), monkeypatch)
    assert len(fold.copies) == CALLS[kind]
    assert written(ours) == written(theirs)
    assert (ours.parameters, ours.frozen, ours.order) == (theirs.parameters, theirs.frozen, theirs.order)
    assert (set(ours.mutated.values()), set(ours.counters.values())) == (
        set(theirs.mutated.values()),
        set(theirs.counters.values()),
    )


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "tries"), [("leaks", 1), ("leaks to the model", 2), ("gathers", 2)])
def test_side_effects_of_layers_are_traced(kind, tries, monkeypatch):
    """Tensors left as attributes of the layer, or in a list of the model, whose length is read or not."""

    ours, seen, theirs = programs(models().Stack(kind), monkeypatch)
    assert [len(f.copies) for f in seen] == [4, 0][-tries:] and written(ours) == written(theirs)


def test_the_model_is_left_as_it_was():
    import torch

    model = models().Stack("plain")
    before = [dict(vars(m)) for m in model.modules()]
    torch_export.program_of(model, (torch.empty(4, 8),), None, reads_op)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert models().Block.forward.__name__ == "forward" and "forward" not in vars(model.layers[1])


def test_a_list_that_layers_share_gets_a_tensor_from_each():
    """Afterwards PyTorch's export leaves other lists in the layers, so such a model can be exported only once."""
    import torch

    model = models().Stack("list")
    ours = torch_export.program_of(model, (torch.empty(4, 8),), None, reads_op)
    assert len(ours.parameters) == 2 + 7 * 5


def test_errors_are_those_of_the_attempt_without_folding(monkeypatch):
    model, seen = models().Stack("plain"), []

    def traced(*_):
        seen.append(None)
        raise RuntimeError(f"attempt {len(seen)}")

    monkeypatch.setattr(torch_export, "_traced", traced)
    with pytest.raises(RuntimeError, match="attempt 2"):
        torch_export._exported(model, (), None, reads_op, {n: n for n, _ in model.named_parameters()}, {})
