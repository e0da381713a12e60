"""Layers that are equal by structure, and the Python state that a module can reach."""

from __future__ import annotations

import pytest

from pase.frontends.torch.export.equal import PythonState, equal_layers, reading
from tests.frontends.torch.export.layers import models

pytestmark = pytest.mark.torch


def test_a_second_attempt_begins_with_what_the_first_did():
    model = models().Stack("list")
    box, held = model.layers[0].box, PythonState.by(model)
    box[0].append(1)
    model.layers[2].kept = 1
    model.layers[3].box = [[]]
    model.layers[4].more = {}
    assert held.changed()
    held.put_back()
    assert not held.changed() and box == [[]] and model.layers[3].box is box
    assert model.layers[2].kept is None and "more" not in vars(model.layers[4])


def stack(change):
    """Five layers, each with its number, of which the third is changed."""
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number, self.act = number, "relu"
            self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    layers = nn.ModuleList(Layer(i) for i in range(5))
    change(layers[2])
    return layers


def widened(layer):
    from torch import nn

    layer.up = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        (lambda layer: None, "01234"),
        (lambda layer: setattr(layer, "act", "gelu"), "0134"),
        (lambda layer: layer.eval(), "0134"),
        (widened, "0134"),
        (lambda layer: layer.up.requires_grad_(False), "0134"),
        (lambda layer: setattr(layer, "number", 7), ""),  # then the numbers do not count the layers
    ],
)
def test_layers_that_differ_in_anything_but_their_number_are_apart(change, equal):
    layers = stack(change)
    found = equal_layers(layers, {path: path for path, _ in layers.named_parameters()})
    assert "".join(layer.path for layer in found.values()) == equal
    assert [layer.last for layer in found.values()] == [False] * (len(equal) - 1) + [True] * bool(equal)
    for layer in found.values():
        assert [(m is layer.module, name) for m, name in layer.counts] == [(True, "number")]


def test_layers_that_share_a_tensor_with_another_module_are_apart():
    layers = stack(lambda layer: None)
    paths = {path: path for path, _ in layers.named_parameters()}
    shared = paths | {"head": "2.up.weight"}
    assert [layer.path for layer in equal_layers(layers, shared).values()] == ["0", "1", "3", "4"]


def test_reading_a_number_is_noticed_and_leaves_the_class_as_it_was():
    layers = stack(lambda layer: None)
    before = dict(vars(type(layers[0])))
    with reading([(layer, "number") for layer in layers]) as read:
        assert layers[3].act == "relu" and not read()
        assert layers[3].number == 3 and read()
    assert dict(vars(type(layers[0]))) == before and layers[4].number == 4
