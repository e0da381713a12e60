"""What a step writes of its module: buffers, and what their next values depend on; and Python state, which no step may
hand to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch_equal import PythonState
from pase.frontends.torch_folded import folding

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph as FxGraph
    from torch.nn import Module

__all__ = ["assigned_buffers", "data_written", "left_behind", "refuse_state"]


@contextlib.contextmanager
def assigned_buffers(module: Module) -> Iterator[None]:
    """Around a call of the module: a buffer that is assigned (``self.code = new``) is written in place instead.

    An exported graph shows what is written in place, and says nothing of an assignment. PaseError where the new value
    cannot take the place of the old one.
    """
    import torch

    held = [
        (m, f"{at}.{name}".lstrip("."), name, old)
        for at, m in module.named_modules()
        for name, old in m._buffers.items()
    ]
    yield
    for m, path, name, old in held:
        new = m._buffers.get(name)
        if new is old:
            continue
        if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise PaseError(
                f"{type(module).__name__}: the step replaces the buffer '{path}', {_kind(old)}, by {_kind(new)}; "
                f"what a step hands to the next keeps its shape and dtype: register the buffer with those"
            )
        if sum(other is old for *_, other in held) > 1:
            raise PaseError(
                f"{type(module).__name__}: the step assigns a new tensor to the buffer '{path}', which other paths "
                f"hold too and which they would keep: write it in place ({name}.copy_(…))"
            )
        with torch.no_grad():
            old.copy_(new)
        m._buffers[name] = old


def _kind(x: object) -> str:
    import torch

    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else "which is None"


_NOT_THE_USERS = ("_gradient_checkpointing_func", "_flat_weights", "forward")
"""What tracing itself changes in modules."""


def left_behind(module: Module, held: PythonState) -> list[str]:
    """What Python state a forward has changed, by name. Parameters and buffers, which are others in a trace, do not
    count."""
    return held.changes(
        _NOT_THE_USERS, {id(d) for m in module.modules() for d in (m._parameters, m._buffers)}
    )


def refuse_state(
    module: Module,
    held: PythonState,
    traced: Callable[[Callable[[], None]], ExportedProgram],
    paths: Mapping[str, str],
    changed: Sequence[str],
) -> None:
    """PaseError if a second step is another program than the first, or cannot be traced since it reads tensors that the
    first one has left. traced: the step, given what is called at its end. changed: names of what the first changes."""
    own = [(d, dict(d)) for m in module.modules() for d in (m._parameters, m._buffers)]
    after: list[PythonState] = []
    with folding(module, paths, False):
        first = traced(lambda: after.append(PythonState.by(module)))
        held.put_back()  # PyTorch's export has put other lists into the module
        after[-1].put_back()
        for d, tensors in own:
            d.clear()
            d.update(tensors)  # type: ignore[arg-type]
        try:
            same = str(first.graph) == str(traced(lambda: None).graph)
        except Exception:
            same = False
    if not same:
        names = ", ".join(f"'{name}'" for name in changed[:4])
        raise PaseError(
            f"{type(module).__name__}: a step leaves Python state behind ({names}) that the next one reads, and an "
            f"exported step would start from the same each time: keep it in a buffer (register_buffer)"
        )


def data_written(
    graph: FxGraph, written: Mapping[str, str], buffers: Mapping[str, str], data: Sequence[str]
) -> frozenset[str]:
    """The nodes, among the next values of buffers, that depend on data: on what enters the step, on parameters, or on
    buffers of which that is so.

    written: node's name -> path. buffers: placeholder -> path. data: placeholders.
    """
    found: set[str] = set()
    while True:
        stateful = {written[n] for n in found}
        reached = {*data, *(n for n, path in buffers.items() if path in stateful)}
        for n in graph.nodes:
            if any(m.name in reached for m in n.all_input_nodes):
                reached.add(n.name)
        if reached.intersection(written) == found:
            return frozenset(found)
        found = reached.intersection(written)
