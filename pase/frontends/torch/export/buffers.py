"""What a step writes of its module: buffers, and what their next values depend on; and Python state, which no step may
hand to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch.export.equal import PythonState
from pase.frontends.torch.export.folded import folding

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.fx import Graph as FxGraph
    from torch.nn import Module

__all__ = ["assignments_in_place", "data_written", "left_behind", "refuse_state"]


@contextlib.contextmanager
def assignments_in_place(module: Module) -> Iterator[None]:
    """Around a call of the module: a buffer or parameter that is assigned (``self.code = new``, ``p.data = new``) is
    written in place instead.

    An exported graph shows what is written in place, and says nothing of an assignment. PaseError where the new value
    cannot take the place of the old one.
    """
    import torch

    held = [
        (tensors, f"{at}.{name}".lstrip("."), name, old)
        for at, m in module.named_modules()
        for tensors in (m._buffers, m._parameters)
        for name, old in tensors.items()
    ]
    paths = {id(old): path for _, path, _, old in held if old is not None}
    data = torch.Tensor.data

    def written(old: Tensor, new: Tensor | None, path: str) -> None:
        if new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise PaseError(
                f"{type(module).__name__}: the step replaces '{path}', {_kind(old)}, by {_kind(new)}; what a step "
                f"hands to the next keeps its shape and dtype: give it those from the beginning"
            )
        with torch.no_grad():
            old.copy_(new)

    def set_data(self: Tensor, new: Tensor) -> None:
        if id(self) in paths:
            written(self, new, paths[id(self)])
        elif self.grad_fn is not None:
            raise PaseError(
                f"{type(module).__name__}: .data of a tensor that is differentiated is assigned, which PyTorch's "
                f"export does not record: write x = x + (new - x).detach()"
            )
        else:
            data.__set__(self, new)  # type: ignore[attr-defined]

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        torch.Tensor.data = data  # type: ignore[method-assign]
    for tensors, path, name, old in held:
        new = tensors.get(name)
        if new is old:
            continue
        if old is None:
            raise PaseError(
                f"{type(module).__name__}: the step replaces '{path}', which is None, by {_kind(new)}: give it a value "
                f"of this shape from the beginning"
            )
        if sum(other is old for *_, other in held) > 1:
            raise PaseError(
                f"{type(module).__name__}: the step assigns a new tensor to '{path}', which other paths hold too and "
                f"which they would keep: write it in place ({name}.copy_(…))"
            )
        written(old, new, path)
        tensors[name] = old  # type: ignore[assignment]


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
