"""Images in Mesh-TensorFlow: steps with split rows and channels equal TensorFlow's on one device."""

import pytest

from tests.backends.mesh_tf.results import assert_steps_are_tensorflows, needs_mesh_tf


@needs_mesh_tf
@pytest.mark.parametrize("model", ["alexnet", "rows", "images"])
def test_a_step_is_tensorflow_s(model):
    assert_steps_are_tensorflows(model)


@needs_mesh_tf
@pytest.mark.release
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("mlp", "random1@2x2x2"),
        ("rows", "random17@2x2"),
        ("parts", "random5@2x2"),
        ("images", "ours@2x2"),
    ],
)
def test_a_step_under_another_strategy_is_tensorflow_s(model, strategy):
    assert_steps_are_tensorflows(model, strategy)
