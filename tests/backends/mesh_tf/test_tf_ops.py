"""TensorFlow ops that Mesh-TensorFlow cannot express are named."""

import re

from tests.backends.mesh_tf.results import needs_mesh_tf, worker


@needs_mesh_tf
def test_what_tensorflow_models_cannot_have_is_named():
    said = worker()["refused"]
    assert "'BiasAdd' at bias" in said["channels"] and "same dims" in said["channels"]
    assert "'Cumsum' at running" in said["cumulative"]
    assert re.search(r"'\w*While' at until.*depends on data", said["until"])
