"""Elementwise functions as Mesh-TensorFlow's or TensorFlow's."""

from tests.backends.mesh_tf.results import needs_mesh_tf, worker


@needs_mesh_tf
def test_every_function_is_the_one_that_the_graph_defines() -> None:
    errors = worker()["functions"]
    assert len(errors) > 45 and {k: e for k, e in errors.items() if not e < 2e-6} == {}
