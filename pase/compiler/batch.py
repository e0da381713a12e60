"""Finds the batch size with the highest throughput, trying powers of two as long as a larger batch pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.compiler.problem.options import CompileOptions
from pase.compiler.resolve import traced_model
from pase.errors import Infeasible, PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem.problem import Progress

__all__ = ["most_throughput"]

_LARGEST = 1 << 24
_LEAST_GAIN = 1.01
"""By what factor a batch of twice the size must raise the throughput, once every device has an example."""

Compile = Callable[[Tree, Tree, Sequence[Tree], CompileOptions, "Progress | None"], "Compiled"]


def most_throughput(
    compile_: Compile,
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    say: Progress,
) -> Compiled:
    """Return the plan for the batch size that processes the most examples per second within the memory limit.

    A step in micro-batches fits with any batch, and each doubling then gains less. The search ends where a doubling
    gains less than 1%. The default limit is the machine's.

    Raises PaseError if the model has no open batch size, or if its costs are not in seconds. Raises Infeasible if no
    batch size fits.
    """
    with_batch = _batches(model, params, batch, options)
    baselines = options.baselines
    options = replace(options, objective="latency", baselines=False)
    asked = options
    best, rate, size = 0, 0.0, 1
    while size <= _LARGEST:
        named, sized = with_batch(size, options)
        say(f"a batch of {size}")
        try:
            found = compile_(named, params, batch, sized, say)
        except Infeasible as e:
            if not best:
                raise Infeasible(f"not even a batch of one fits: {e.what}", where=e.where, fix=e.fix) from e
            break
        limit = asked.limit_bytes(found.problem.machine)
        if limit is None:
            raise PaseError(
                "it finds the largest batch that fits in memory, but there is no memory limit",
                where="objective='throughput'",
                fix="give a memory limit",
            )
        options = replace(options, memory_limit=limit)  # a stated limit makes it an error if nothing fits
        if not best and found.plan.memory.total > limit:
            raise Infeasible(
                f"not even a batch of one fits within {limit / 2**30:.4g} GiB",
                fix="use more devices or a smaller model",
            )
        now = size / found.plan.cost
        if now < 0.9 * rate or (size > options.devices and now < _LEAST_GAIN * rate):
            break
        if now > rate:
            best, rate = size, now
        size *= 2
    named, sized = with_batch(best, replace(asked, baselines=baselines))
    return compile_(named, params, batch, sized, say)


def _batches(
    model: Tree, params: Tree, batch: Sequence[Tree], options: CompileOptions
) -> Callable[[int, CompileOptions], tuple[Tree, CompileOptions]]:
    """Return f(size, options) -> the model and the options with this batch size."""
    if options.cost_model != "analytic":
        raise PaseError(
            "it needs costs in seconds", where="objective='throughput'", fix="use cost_model='analytic'"
        )
    if isinstance(model, str) and model.startswith("zoo:"):
        if "batch=" in model:
            raise PaseError(
                "it finds the batch size itself",
                where="objective='throughput'",
                fix=f"leave batch= out of '{model}'",
            )
        return lambda size, o: (f"{model}{'&' if '?' in model else '?'}batch={size}", o)
    traced, name = traced_model(model, params, batch, options)
    if len(traced.graph.symbols) != 1:
        free = ", ".join(traced.graph.symbols) or "none"
        raise PaseError(
            f"it finds the batch size, so '{name}' must have exactly one open size, its batch, but has: {free}",
            where="objective='throughput'",
            fix="leave the size of the batch open with jax.export.symbolic_shape",
        )
    (symbol,) = traced.graph.symbols
    return lambda size, o: (model, replace(o, dims={**(o.dims or {}), symbol: size}))
