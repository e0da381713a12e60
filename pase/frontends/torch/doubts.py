"""Finds where the gradient of a PyTorch program may intentionally differ from the slope of its loss.

Reasons are values without a gradient (including those of a user's ``autograd.Function``), choices, and values rounded
to integers. For each parameter, the ops between it and the loss are searched statically.
"""

from __future__ import annotations

from collections.abc import Iterator

from pase.frontends.torch.export.functional import NO_GRADIENT
from pase.frontends.torch.frontend import TracedTorch
from pase.frontends.torch.lower import live, source_of
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import op_name

__all__ = ["coarsest", "doubts", "random_ops"]

_STOPPED = frozenset({"detach", "detach_"})
_ROUNDED = frozenset(
    {"floor", "ceil", "round", "trunc", "sign", "argmax", "argmin", "floor_divide", "fmod", "remainder"}
)
_CHOSEN_BY_ORDER = frozenset({"sort", "argsort", "topk"})
_COMPARED = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_RUN_BY_CHOICE = frozenset({"cond", "while_loop"})


def doubts(traced: TracedTorch) -> dict[str, str]:
    """Path of a parameter -> the first op towards the loss that changes the slope: what it does, and its line."""
    program = traced.program
    paths = list(dict.fromkeys(program.parameters.values()))
    bit = {node: 1 << paths.index(path) for node, path in program.parameters.items()}
    reached: dict[str, int] = {}
    out: dict[str, str] = {}
    for n in live(program.graph.graph, program.losses):
        mask = bit.get(n.name, 0)
        for m in n.all_input_nodes:
            mask |= reached[m.name]
        reached[n.name] = mask
        if not mask or n.op != "call_function" or (what := _doubtful(n)) is None:
            continue
        for i, path in enumerate(paths):
            if mask >> i & 1:
                out.setdefault(path, what)
    return out


def _doubtful(n: FxNode) -> str | None:
    """What an op does to the slope, and the user's line; None if its gradient is the slope of its result."""
    name = op_name(n).partition(".")[0]
    if name in _STOPPED or NO_GRADIENT in (n.meta.get("custom") or {}):
        what = "a value without a gradient"
    elif name in _ROUNDED or _to_integers(n):
        what = f"a rounded value ({name})"
    elif name in _CHOSEN_BY_ORDER or (name in _COMPARED and _floats(n.all_input_nodes[0])):
        what = f"a choice ({name})"
    elif name in _RUN_BY_CHOICE:
        what = "a choice of what runs"
    else:
        return None
    return f"{what} at {source_of(n).place or 'an unknown line'}"


def _to_integers(n: FxNode) -> bool:
    """Whether an op converts floating-point numbers to integers."""
    return (
        op_name(n) in ("to", "_to_copy", "type_as", "bucketize")
        and _floats(n.all_input_nodes[0])
        and not _floats(n)
    )


def _floats(n: FxNode) -> bool:
    return any(t.is_floating_point or t.is_complex for t in _dtypes(n))


def _dtypes(n: FxNode) -> Iterator:  # type: ignore[type-arg]
    import torch

    value = n.meta.get("val")
    for x in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(x, torch.Tensor):
            yield x.dtype


def coarsest(traced: TracedTorch, tf32: bool) -> float:
    """The machine epsilon (spacing of numbers above 1) of the coarsest floating-point dtype in a program.

    tf32: whether the device rounds float32 operands to TF32.
    """
    import torch

    found = {d for n, _ in traced.scope.every() for d in _dtypes(n) if d.is_floating_point or d.is_complex}
    eps = [float(torch.finfo(d).eps) for d in found]
    if tf32 and torch.float32 in found:
        eps.append(2.0**-10)
    return max(eps)


def random_ops(traced: TracedTorch) -> Iterator[FxNode]:
    """The nodes that draw random values."""
    import torch

    for n, _ in traced.scope.every():
        if n.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()):
            continue
        given = dict(zip((a.name for a in n.target._schema.arguments), n.args, strict=False)) | dict(n.kwargs)
        if given.get("train") is False or given.get("dropout_p", None) == 0.0 or given.get("p", None) == 0.0:
            continue
        if "dropout_p" not in given and "attention" in op_name(n):  # attention has no dropout by default
            continue
        yield n
