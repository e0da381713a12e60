"""From what the user calls a model to its trace: a name, or a callable with example arguments."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.frontends.from_jax import Traced

__all__ = ["resolve", "traced_model"]


def traced_model(model: Any, params: Any, batch: Sequence[Any], unknown: Any) -> tuple[Traced, str]:
    """Trace what the user gave as a model: (the trace, its name)."""
    if isinstance(model, str):
        if params is not None or batch:
            raise PaseError(f"'{model}' names a model: give no further arguments with it")
        return resolve(model, unknown), model
    if not callable(model):
        raise PaseError(
            f"a model is a name or a callable, not {type(model).__name__}: see pase.compile's help"
        )
    if params is None:
        raise PaseError(
            "give the loss function's example arguments after it: pase.compile(loss_fn, params, batch, devices=…)"
        )
    from pase.frontends.from_jax import trace

    traced = trace(model, params, *batch, unknown=unknown)
    return traced, traced.graph.name


def resolve(model: str, unknown: Literal["error", "replicate"] = "error") -> Traced:
    """Trace the model that this name means: zoo:NAME or package.module:function."""
    from pase.frontends.from_jax import trace

    if model.startswith("zoo:"):
        from pase import zoo

        m = zoo.get(model.removeprefix("zoo:"))
        return trace(m.loss_fn, m.params, m.batch, name=model, unknown=unknown)
    suffix = Path(model).suffix
    if suffix in (".onnx", ".pb") or Path(model).is_dir():
        raise PaseError(
            f"{model}: this version reads JAX models only; ONNX and TensorFlow frontends are not there yet"
        )
    module, _, attribute = model.partition(":")
    if not attribute or not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise PaseError(
            f"'{model}' is not a model: write zoo:NAME (see 'pase zoo') or package.module:function"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise PaseError(f"cannot import '{module}' for model '{model}': {e}") from e
    except AttributeError as e:
        raise PaseError(f"module '{module}' has no '{attribute}'") from e
    try:
        inspect.signature(function).bind()
    except TypeError as e:
        raise PaseError(
            f"{model} must be a function without arguments that returns (loss_fn, params, *batch): {e}"
        ) from e
    made = function()
    if not isinstance(made, tuple) or len(made) < 2 or not callable(made[0]):
        raise PaseError(f"{model}() must return (loss_fn, params, *batch), got {type(made).__name__}")
    return trace(made[0], made[1], *made[2:], name=model, unknown=unknown)
