"""Layouts and tensors are refused where Mesh-TensorFlow refuses them."""

import re

import pytest

from pase.backends.mesh_tf.legality import check_layout, check_tensor
from pase.errors import PaseError
from tests.backends.mesh_tf.results import needs_mesh_tf, worker


@pytest.mark.parametrize(
    ("mesh", "layout", "where", "texts"),
    [
        ("x:2;y:2", "a:x;a:y", "layout_rules", ("'a'", "x and y")),
        ("x:2", "a:y", "layout_rules", ("'a'", "'y'", "x:2")),
        ("x:0", "", "mesh_shape 'x:0'", ("'x'", "'0'")),
        ("x:2;x:4", "", "mesh_shape 'x:2;x:4'", ("'x'", "twice")),
        ("x:2", "a", "layout_rules 'a'", ("'a'", "NAME:VALUE")),
    ],
)
def test_a_layout_that_mesh_tf_would_refuse(mesh, layout, where, texts):
    with pytest.raises(PaseError) as e:
        check_layout(mesh, layout)
    assert e.value.where == where and all(t in e.value.what for t in texts)


@pytest.mark.parametrize(
    ("dims", "whole", "texts"),
    [
        ([("a", 4), ("b", 4)], (), ("'a'", "'b'", "both", "'x'")),
        ([("a", 3)], (), ("'a'", "3 elements", "2 devices")),
        ([("c", 3), ("c", 3)], (), ("twice", "'c'")),
        ([("a", 4)], ("a",), ("this op cannot split", "'a'")),
    ],
)
def test_a_tensor_that_mesh_tf_would_refuse(dims, whole, texts):
    with pytest.raises(PaseError) as e:
        check_tensor("t", dims, *check_layout("x:2", "a:x;b:x"), whole=whole)
    assert e.value.where == "t" and all(t in e.value.what for t in texts)


@needs_mesh_tf
def test_our_rules_are_mesh_tf_s():
    """pase refuses all that Mesh-TF refuses, and in addition rules that give two axes to a dim that no tensor has."""
    cases = worker()["rules"]
    assert len(cases) == 400 and 50 < sum(bool(c["theirs"]) for c in cases) < 350
    for c in cases:
        assert c["ours"] or not c["theirs"], c
        if c["ours"] and not c["theirs"]:
            (dim,) = re.findall(r"dim '(\w)' has two mesh axes", c["ours"])
            assert f"{dim}:" not in c["dims"], c
