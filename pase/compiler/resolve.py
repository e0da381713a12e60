"""Traces a model from what the user passes: a name, a file, or an object with example arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pase.errors import PaseError, did_you_mean
from pase.frontends import registry
from pase.frontends.blocks import as_padded
from pase.frontends.registry import DimSizes, Traced, Unknown
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.compiler.problem.options import CompileOptions
    from pase.plan.types import PlanData
    from pase.zoo import ZooModel

__all__ = ["attached", "own_program", "resolve", "traced_model"]

AnyPlan = TypeVar("AnyPlan", bound="PlanData")


def attached(plan: AnyPlan, traced: Traced) -> AnyPlan:
    """Return the plan with its model, padded as the plan says. Raises PaseError if it is not the plan's model."""
    return plan.with_model(as_padded(traced, plan.padding))


def traced_model(
    model: Tree, params: Tree, batch: Sequence[Tree], options: CompileOptions
) -> tuple[Traced, str]:
    """Trace the user's model under the options. Returns (the trace, its name)."""
    purpose: dict[str, Any] = {
        "mode": options.mode,
        "carry": options.carry,
        "chances": options.chances,
        "loss": options.loss,
    }
    if isinstance(model, (str, Path)):
        if params is not None or batch:
            raise PaseError(
                "a named model takes no further arguments",
                where=f"'{model}'",
                fix="pass the name alone, or a callable with its arguments",
            )
        return resolve(str(model), options.unknown, options.dims, **purpose), str(model)
    if registry.frontend_of(model) is None:
        raise PaseError(
            f"a model is a name, a file, a callable, or a framework's own model, not {type(model).__name__}",
            fix="see pase.compile's help",
        )
    args = () if params is None and not batch else (params, *batch)
    traced = registry.trace(model, *args, unknown=options.unknown, dims=options.dims, **purpose)
    return traced, traced.graph.name


def _of_task(m: ZooModel) -> tuple[Tree, dict[str, Any]]:
    """Return a zoo model's task as a program: (function, ``mode`` and ``carry``)."""
    if m.task == "train":
        return m.loss_fn, {}
    if m.decode is not None:
        from pase.frontends.jax.generation import Generation

        tokens = int(m.settings["tokens"])
        return Generation(prefill=m.loss_fn, decode=m.decode, tokens=tokens), {"mode": "inference"}
    return m.loss_fn, {"mode": "inference", "carry": {1: 1} if m.cache is not None else None}


def resolve(model: str, unknown: Unknown = "error", dims: DimSizes | None = None, **purpose: Any) -> Traced:
    """Trace the model that a name refers to.

    The name is zoo:NAME, hf:CLASS, a file or folder that a frontend reads, or package.module:function.
    """
    if model.startswith("zoo:"):
        from pase import zoo

        m = zoo.get(model.removeprefix("zoo:"))
        fn, own = _of_task(m)
        return registry.trace(
            fn, m.params, *m.inputs, name=model, unknown=unknown, dims=dims, **purpose | own
        )
    if registry.frontend_of(model) is not None:
        if Path(model).suffix and ":" not in model and not os.path.exists(model):
            raise PaseError("there is no such file", where=model, fix="check the path")
        return registry.trace(model, unknown=unknown, dims=dims, **purpose)
    target, *args = own_program(model)
    return registry.trace(target, *args, name=model, unknown=unknown, dims=dims, **purpose)


def own_program(model: str) -> tuple[Any, ...]:
    """Call the user's function package.module:function. Returns what it returned: (what a frontend reads, *arguments).

    Raises PaseError if the name is none of such a function, or the function returns something else.
    """
    module, _, attribute = model.partition(":")
    if module.endswith(".py") and attribute:
        named = ".".join(Path(module).with_suffix("").parts)
        raise PaseError(
            "it names a file, not a module", where=f"model '{model}'", fix=f"write {named}:{attribute}"
        )
    if "?" in attribute:
        raise PaseError(
            "settings behind ? are for models of zoo: and hf:",
            where=f"model '{model}'",
            fix=f"write a function that makes the model with these settings, and name it as {module}:NAME",
        )
    if not attribute or not all(part.isidentifier() for part in (*module.split("."), attribute)):
        if model.endswith(".json") and os.path.exists(model):
            raise PaseError(
                "it is a file of JSON, and a model is expected",
                where=model,
                fix="name the model itself, such as zoo:gpt2, or hf:./config.json for a configuration of transformers",
            )
        raise PaseError(
            f"'{model}' is not a model",
            fix="write zoo:NAME (see 'pase zoo'), hf:CLASS (a class of transformers), a model file (.onnx, .keras, "
            ".pb, a SavedModel's folder), or package.module:function",
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ImportError as e:
        raise PaseError(f"cannot import '{module}': {e}", where=f"model '{model}'") from e
    except AttributeError as e:
        hint = did_you_mean(attribute, vars(sys.modules[module]))
        raise PaseError(f"module '{module}' has no '{attribute}'{hint}", where=f"model '{model}'") from e
    try:
        inspect.signature(function).bind()
    except TypeError as e:
        raise PaseError(
            f"it must be a function without arguments: {e}",
            where=model,
            fix="let it return (loss_fn, params, *batch), or a PyTorch module with a batch and optionally its loss",
        ) from e
    made = function()
    target, *args = made if isinstance(made, tuple) and made else (made,)
    if registry.frontend_of(target) is None or (not args and inspect.isfunction(target)):
        raise PaseError(
            f"it returned {type(made).__name__}, which is not a model",
            where=f"{model}()",
            fix="let it return (loss_fn, params, *batch), (module, *batch) or (module, *batch, loss) of PyTorch, or "
            "another framework's own model",
        )
    return target, *args
