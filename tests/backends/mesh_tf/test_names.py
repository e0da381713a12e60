"""Axes that are used together are one axis of Mesh-TensorFlow's mesh."""

from pase.backends.mesh_tf.names import Names, merged_axes
from pase.ir import from_text
from pase.machine import Mesh


def test_axes_that_are_never_used_apart_become_one():
    mesh = Mesh(names=("x", "y", "z", "w"), sizes=(2, 2, 4, 1))
    together = [{"b": ("x", "y")}, {"k": ("z",), "b": ("x", "y")}, {}]
    assert merged_axes(mesh, together)[1] == {"x_y": 4, "z": 4}
    assert merged_axes(mesh, [*together, {"h": ("x",)}])[1] == {"x": 2, "y": 2, "z": 4}


def test_an_axis_that_splits_what_walks_no_tensor_is_used_by_none():
    """Only the copy's pending dim uses x alone. It does not index a tensor, so x and y are merged all the same."""
    graph = from_text(
        "graph g\ntensor t float32[8] activation\ntensor u float32[8] activation copy=t\n"
        "node t (b=8)\n  generate iota -> t[b]\n"
        "node u (b=8, pending=0 pending)\n  copy copy t[b] -> u[b]\n"
    )
    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    strategy = {"t": {"b": ("x", "y")}, "u": {"b": ("x", "y"), "pending": ("x",)}}
    assert Names(graph, mesh, strategy).axes == {"x_y": 4}
