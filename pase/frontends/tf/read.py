"""Reads any form of a TensorFlow model as a graph: a file, a GraphDef, or an object in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pase.errors import PaseError, install_line
from pase.frontends.registry import DimSizes
from pase.frontends.tf import files, keras_files, live
from pase.frontends.tf.sources import KERAS_SUFFIX, TfSource, is_graph_def, is_keras
from pase.pytree import Tree

__all__ = ["read_source"]


def read_source(model: object, args: Sequence[Tree], name: str | None, dims: DimSizes) -> TfSource:
    """Read a model that ``sources.reads`` accepts. dims: sizes for dims that are not known, see ``bound``."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no start-up messages on standard error
    try:
        import tensorflow  # noqa: F401
    except ImportError as e:
        raise PaseError(
            f"reading TensorFlow models needs TensorFlow ({e})", fix=f"run: {install_line('tf')}"
        ) from e
    if isinstance(model, (str, Path)):
        if args:
            raise PaseError(
                "a model in a file takes no example arguments",
                where=str(model),
                fix="give no arguments after it",
            )
        if Path(model).suffix == KERAS_SUFFIX:
            return live.from_keras(keras_files.keras_model(Path(model)), (), name or str(model), dims)
        return files.from_path(Path(model), name or str(model), dims)
    if is_graph_def(model):
        return files.frozen(model, name or "graph", dims)
    if is_keras(model):
        return live.from_keras(model, args, name, dims)
    return live.from_function(model, args, name, dims)
