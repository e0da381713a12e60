"""The feature maps of Inception and DenseNet are those of each paper's table of layers."""

from __future__ import annotations

import pytest

from tests.zoo.jaxprs import feature_maps


# The last feature map before the classifier, from each paper's table of layers.
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("inception_v3", [(1, 147, 147, 64), (1, 35, 35, 288), (1, 17, 17, 768), (1, 8, 8, 2048)]),
        ("densenet121", [(1, 56, 56, 256), (1, 28, 28, 512), (1, 14, 14, 1024), (1, 7, 7, 1024)]),
    ],
)
def test_feature_maps(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert set(shapes) <= feature_maps(name)
