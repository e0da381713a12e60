"""Files saved by Keras give the same graph as the model itself. Custom classes and damaged files are refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import keras

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace

BATCH = {"batch": 8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    inputs = keras.Input((16,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(8, activation="relu")(inputs)))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="adam")
    path = tmp_path_factory.mktemp("keras") / "model.keras"
    model.save(path)
    return model, path


def test_the_file_is_the_model(saved: tuple[Any, Path]) -> None:
    model, path = saved
    read, own = trace(str(path), name="m", dims=BATCH), trace(model, name="m", dims=BATCH)
    assert read.param_paths == own.param_paths
    assert [(n.kind, n.main.einsum) for n in read.graph.nodes] == [
        (n.kind, n.main.einsum) for n in own.graph.nodes
    ]
    assert "labels" in read.input_paths


def changed(path: Path, to: Path, edit: Any) -> Path:
    """The file with another configuration."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            new.writestr(name, edit(old.read(name)) if name == "config.json" else old.read(name))
    return to


def strange(text: bytes) -> bytes:
    config = json.loads(text)
    config["config"]["layers"][1] |= {"module": "os", "class_name": "system"}
    return json.dumps(config).encode()


def test_custom_classes_are_neither_imported_nor_run(saved: tuple[Any, Path], tmp_path: Path) -> None:
    path = changed(saved[1], tmp_path / "bad.keras", strange)
    with pytest.raises(PaseError, match="'os'") as e:
        trace(path, dims=BATCH)
    assert e.value.where == str(path) and "pase.compile" in e.value.fix


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "not a Keras file"), (b"PK\x03\x04" * 9, "not a Keras file"), (None, "cannot read")],
)
def test_other_files_are_refused(content: bytes | None, word: str, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PaseError, match=word) as e:
        trace(path, dims=BATCH)
    assert e.value.where == str(path)


def test_a_zip_bomb_is_refused_unopened(tmp_path: Path) -> None:
    """64 MiB of spaces in a few kilobytes."""
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b" " * ((64 << 20) + 1))
    with pytest.raises(PaseError, match="67108864"):
        trace(path, dims=BATCH)


def test_damaged_configurations_are_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    for text in (b"{}", b"[1]", b'{"module":"keras.layers","class_name":"None","config":{}}', b"null"):
        path = changed(saved[1], tmp_path / "d.keras", lambda _, text=text: text)
        with pytest.raises(PaseError):
            trace(path, dims=BATCH)


def doubled(text: bytes) -> bytes:
    config = json.loads(text)
    config["config"]["output_layers"] *= 2
    return json.dumps(config).encode()


def test_a_configuration_that_keras_cannot_build_is_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    path = changed(saved[1], tmp_path / "doubled.keras", doubled)
    with pytest.raises(PaseError, match="Keras cannot build") as e:
        trace(path, dims=BATCH)
    assert e.value.where == str(path)
