"""The feature maps of AlexNet, VGG and ResNet are those of each paper's table of layers."""

from __future__ import annotations

import pytest

from tests.zoo.jaxprs import feature_maps


# The last feature map before the classifier, from each paper's table of layers.
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("alexnet", [(1, 55, 55, 96), (1, 27, 27, 256), (1, 13, 13, 384), (1, 6, 6, 256)]),
        ("resnet101", [(1, 56, 56, 256), (1, 28, 28, 512), (1, 14, 14, 1024), (1, 7, 7, 2048)]),
        ("vgg19", [(1, 224, 224, 64), (1, 112, 112, 128), (1, 14, 14, 512), (1, 7, 7, 512)]),
    ],
)
def test_feature_maps(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert set(shapes) <= feature_maps(name)
