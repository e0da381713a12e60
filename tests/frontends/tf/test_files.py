"""Graphs in files: whole ones are read, and broken ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.frontends.tf import frontend as from_tf
from pase.frontends.tf.frontend import trace
from pase.ir import simplify, verify
from tests.frontends.tf.graphs import frozen, graph, refused, transformer
from tests.ir.graphs import flops

PRODUCT = ("y", "MatMul", ["x", "w"], {"T": tf.float32})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pb"
    data = graph(PRODUCT).SerializeToString()
    path.write_bytes(data)
    assert trace(str(path)).param_paths == ("w",)
    for cut in (1, len(data) // 3, len(data) - 1):
        path.write_bytes(data[:cut])
        refused(str(path))
    path.write_bytes(b"")
    refused(str(path), "no graph")
    path.write_bytes(b"\x00" * 1000)
    refused(str(path), "model.pb")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(data[: len(data) // 2])
    assert from_tf.reads(folder)
    refused(folder, "saved_model.pb")
    refused(tmp_path / "none.pb", "cannot read")


@settings(max_examples=30)
@given(st.sampled_from(["lstm v1", "convnet"]), st.data())
def test_mutated_bytes(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    raw = bytearray(frozen(name).SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) - 7, len(raw) // 2]))
    path = tmp_path_factory.mktemp("pb") / "model.pb"
    path.write_bytes(bytes(raw[:cut]))
    try:
        traced = trace(path, dims={"batch": 4})
    except PaseError as e:
        assert str(e)
    else:
        verify(simplify(traced.graph))


BATCH = {"batch": 4}


def test_saved_model(tmp_path: Path) -> None:
    """A SavedModel is read from its protos, with the signature's inputs and the model's paths, without weights."""
    model = transformer()
    model.export(tmp_path / "m", verbose=False)
    for file in (tmp_path / "m" / "variables").iterdir():
        file.unlink()
    traced = trace(str(tmp_path / "m"), dims=BATCH)
    assert set(traced.param_paths) == {v.path for v in model.trainable_variables}
    assert traced.input_paths == ("tokens",)
    inference = flops(trace(model, dims=BATCH).graph, "matmul")
    assert flops(traced.graph, "matmul") == inference
    with pytest.raises(PaseError, match="--dim batch=64"):
        trace(tmp_path / "m")
