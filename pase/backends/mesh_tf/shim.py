"""Mesh-TensorFlow on a current TensorFlow.

mesh-tensorflow 0.1.21 (its last release, 2022) needs two things that TensorFlow has since dropped. Generated
programs use neither:

- ``tensorflow.compat.v1.estimator``: TensorFlow 2.16 removed Estimators; when it is imported, Mesh-TF derives
  checkpoint hooks from two of their classes;
- ``tensorflow.python.framework.ops.register_tensor_conversion_function``: moved to ``tensor_conversion_registry``;
  it is called for the variables of a TPU.

Both are restored before the import if they are missing. Upstream's own tests then pass on TensorFlow 2.21.
"""

from __future__ import annotations

import logging
import os
import types
from typing import TYPE_CHECKING

from pase.errors import PaseError, install_line

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["mesh_tensorflow"]


def mesh_tensorflow() -> tuple[ModuleType, ModuleType]:
    """(mesh_tensorflow, tensorflow.compat.v1), imported. Raises PaseError if one is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import tensorflow.compat.v1 as tf
        from tensorflow.python.framework import ops, tensor_conversion_registry
    except ImportError as e:
        raise PaseError(f"Mesh-TensorFlow needs TensorFlow ({e}): {install_line('tf')}") from e

    if not hasattr(tf, "estimator"):

        class Hook:
            """A placeholder for a base class of Estimators."""

        tf.estimator = types.SimpleNamespace(
            SessionRunHook=Hook,
            CheckpointSaverListener=Hook,
            ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"),
        )
    if not hasattr(ops, "register_tensor_conversion_function"):
        ops.register_tensor_conversion_function = (
            tensor_conversion_registry.register_tensor_conversion_function
        )
    try:
        import mesh_tensorflow as mtf
    except ImportError as e:
        raise PaseError(f"cannot import mesh-tensorflow ({e}): {install_line('tf')}") from e
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns for every variable
    return mtf, tf
