"""Imports Mesh-TensorFlow on a current TensorFlow.

mesh-tensorflow 0.1.21 (its last release, 2022) needs two things that TensorFlow has removed since. Generated programs
use neither:

- ``tensorflow.compat.v1.estimator``: TensorFlow 2.16 removed Estimators. On import, Mesh-TF derives checkpoint hooks
  from two of their classes.
- ``tensorflow.python.framework.ops.register_tensor_conversion_function``: moved to ``tensor_conversion_registry``.
  Mesh-TF calls it for variables on a TPU.

If they are missing, both are restored before the import. Mesh-TF's own tests then pass on TensorFlow 2.21.
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
    """Import and return (mesh_tensorflow, tensorflow.compat.v1). Raises PaseError if one is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import tensorflow.compat.v1 as tf
        from tensorflow.python.framework import ops, tensor_conversion_registry
    except ImportError as e:
        raise PaseError(
            f"TensorFlow cannot be imported ({e})", where="Mesh-TensorFlow", fix=install_line("tf")
        ) from e

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
        raise PaseError(
            f"mesh-tensorflow cannot be imported ({e})", where="Mesh-TensorFlow", fix=install_line("tf")
        ) from e
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # TensorFlow would warn about every variable
    return mtf, tf
