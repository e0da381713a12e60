"""A TensorFlow graph walked a second time: a step of a model with unrolled loops equals TensorFlow's on one device."""

import pytest

from tests.backends.mesh_tf.results import assert_steps_are_tensorflows, needs_mesh_tf


@needs_mesh_tf
@pytest.mark.parametrize("model", ["lstm"])
def test_a_step_is_tensorflow_s(model):
    assert_steps_are_tensorflows(model)
