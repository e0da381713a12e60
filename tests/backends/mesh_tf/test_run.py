"""Steps in Mesh-TensorFlow equal TensorFlow's on one device, and move what the plan says."""

import pytest

from tests.backends.mesh_tf.results import assert_steps_are_tensorflows, needs_mesh_tf, worker


@needs_mesh_tf
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_a_step_is_tensorflow_s(model):
    assert_steps_are_tensorflows(model)


@needs_mesh_tf
def test_mesh_tf_moves_what_the_plan_says():
    """Mesh-TF has no reduce-scatter: what the plan reduce-scatters is all-reduced and then sliced."""
    step = worker()["mlp ours@4x2"]
    planned, lowered = step["planned"], step["lowered"]
    assert lowered["allconcat"] == planned["all_gather"] > 0
    summed = planned["all_reduce"] + planned["reduce_scatter"]
    assert summed <= lowered["allreduce"] <= summed + planned.get("all_to_all", 0)
