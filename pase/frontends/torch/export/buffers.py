"""State of a module that a step writes: buffers, and Python state, which a step must not pass on to the next step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """Within, assignments to buffers and parameters (``self.code = new``, ``p.data = new``) become writes in place.

    An exported graph contains writes in place, but no assignments. Raises PaseError if the new value cannot be written
    into the old tensor.
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
                f"the step replaces '{path}', {_kind(old)}, by a value of another kind, {_kind(new)}, but state that "
                f"is passed from step to step must keep its shape and dtype",
                where=type(module).__name__,
                fix="give it this shape and dtype from the beginning",
            )
        with torch.no_grad():
            old.copy_(new)

    def refuse_one_tensor(path: str, new: Tensor, now: Iterable[tuple[str, Tensor | None]]) -> None:
        same = [p for p, t in now if p != path and _share(t, new)]
        if same:
            raise PaseError(
                f"after the step, '{path}' and '{same[0]}' are one tensor, so that a later write to one changes both",
                where=type(module).__name__,
                fix=f"assign a copy to '{path}' (….clone())",
            )

    def set_data(self: Tensor, new: Tensor) -> None:
        if id(self) in paths:
            refuse_one_tensor(
                paths[id(self)], new, ((path, old) for _, path, _, old in held if old is not self)
            )
            written(self, new.clone() if _share(self, new) else new, paths[id(self)])
        elif self.grad_fn is not None:
            raise PaseError(
                "the step assigns .data of a tensor that is differentiated, which PyTorch's export does not record",
                where=type(module).__name__,
                fix="write x = x + (new - x).detach()",
            )
        else:
            data.__set__(self, new)  # type: ignore[attr-defined]

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        torch.Tensor.data = data  # type: ignore[method-assign]
    assigned = [(*x, tensors.get(x[2])) for x in held if (tensors := x[0]).get(x[2]) is not x[3]]
    for _, path, name, old, new in assigned:
        if old is None:
            raise PaseError(
                f"the step replaces '{path}', which is None, by {_kind(new)}",
                where=type(module).__name__,
                fix="give it a value of this shape from the beginning",
            )
        if sum(other is old for *_, other in held) > 1:
            raise PaseError(
                f"the step assigns a new tensor to '{path}', but the module holds the old tensor under other paths too",
                where=type(module).__name__,
                fix=f"write it in place ({name}.copy_(…))",
            )
        if new is not None:
            refuse_one_tensor(path, new, ((p, t.get(n)) for t, p, n, _ in held))
    # A new value may be the old one of another buffer: it is read before anything is written.
    olds = [old for *_, old in held]
    values = [
        new.clone() if new is not None and any(_share(o, new) for o in olds) else new for *_, new in assigned
    ]
    for (tensors, path, name, old, _), value in zip(assigned, values, strict=True):
        written(old, value, path)
        tensors[name] = old  # type: ignore[assignment]


def _share(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    return a is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _kind(x: object) -> str:
    import torch

    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else "no tensor"


_NOT_THE_USERS = ("_gradient_checkpointing_func", "_flat_weights", "forward")
"""Attributes that tracing itself changes."""


def left_behind(module: Module, held: PythonState) -> list[str]:
    """Names of the Python state that a forward has changed.

    Parameters and buffers do not count, because they are replaced by fake tensors in a trace.
    """
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
    """PaseError if a second step is a different program than the first.

    The same holds if the second step cannot be traced because it reads tensors that the first one left behind. traced:
    traces the step, given a function to call at its end. changed: names of the state that the first step changes.
    """
    own = [(d, dict(d)) for m in module.modules() for d in (m._parameters, m._buffers)]
    after: list[PythonState] = []
    with folding(module, paths, False):
        first = traced(lambda: after.append(PythonState.by(module)))
        held.put_back()  # PyTorch's export has replaced lists in the module
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
            f"a step changes Python state ({names}) that the next step reads, but an exported step would start from "
            f"the same state each time",
            where=type(module).__name__,
            fix="keep the state in a buffer (register_buffer)",
        )


def data_written(
    graph: FxGraph, written: Mapping[str, str], buffers: Mapping[str, str], data: Sequence[str]
) -> frozenset[str]:
    """The nodes among the next values of buffers that depend on data.

    Data are the inputs, the parameters, and buffers whose next values depend on data. written: name of a node -> path
    of the buffer whose next value it is. buffers: placeholder -> path. data: placeholders of parameters and inputs.
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
