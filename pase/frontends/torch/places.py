"""Refuses an index that is known and lies outside of its dim.

PyTorch refuses such a call when it runs it. A step is exported on tensors without data, so that the call would get a
plan and a price. The indices that are known are computed here: those that depend on no input and on no parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pase.errors import PaseError
from pase.frontends.torch.constants import applied
from pase.frontends.torch.control import CONTROL
from pase.frontends.torch.lower import place_of, source_of
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchOperand, TorchScope, arguments, op_name, reads_contents

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_places"]

_MOST_ELEMENTS = 1 << 22
"""Larger constants are not computed, and indices that are made of them are not checked."""
_ALONG_DIM = frozenset(
    {"gather", "index_select", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"}
)
_LOOKUPS = frozenset({"embedding", "embedding_bag"})
_BY_INDICES = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put"})
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})


class _Indexed(NamedTuple):
    """An operand that is an index, the size of the dim that it indexes, whether a negative index counts from the dim's
    end, and the index that means none (a loss's ``ignore_index``)."""

    places: FxNode
    size: int
    from_end: bool = False
    ignored: int | None = None


def check_places(scope: TorchScope, held: Mapping[str, Tensor], model: str) -> None:
    """Raise PaseError if a known index lies outside of its dim, with the call, its layer and its line.

    scope: of the whole step. held: placeholder -> the tensor that the model holds there, of those that the step only
    reads. model: names the model in the message.

    Bodies of branches and loops are left out, because they may never run.
    """
    known = _KnownContents(
        held=held,
        leaves={k: v for s in scope.scopes() for k, v in s.leaves.items()},
        module_of=_modules(scope),
    )
    for n, outer in _calls(scope):
        for found in _indices(n):
            if (
                op_name(outer) == "index_fill"
            ):  # PyTorch decomposes it into a copy, which counts no place from the end
                found = found._replace(from_end=True)
            bad = _outside(found, known)
            if bad is not None:
                from_end = "" if bad >= 0 or found.from_end else ", and this op takes none from the end"
                raise PaseError(
                    f"its index {bad} is not in a dim of {found.size} elements{from_end}: PyTorch refuses the step "
                    "when it runs",
                    where=place_of(outer, model, source_of(outer).place),
                    fix="correct the index, or the size of what it indexes",
                )


def _calls(scope: TorchScope) -> Iterator[tuple[FxNode, FxNode]]:
    """The calls of a step, those of decomposed ones included, each with the call that the user's code makes."""
    for n, path in scope.every():
        outer = scope.nodes[int(path.partition(".")[0])]
        if n.op == "call_function" and op_name(outer) not in CONTROL:
            yield n, outer


def _modules(scope: TorchScope) -> dict[FxNode, object]:
    return {n: s.module for s in scope.scopes() for n in s.nodes if n.op == "get_attr"}


def _indices(n: FxNode) -> Iterator[_Indexed]:
    """The operands of a call that are indices."""
    name = op_name(n)
    if name not in _ALONG_DIM | _LOOKUPS | _BY_INDICES | _LOSSES | {"one_hot"}:
        return
    given = arguments(n.target, n.args, n.kwargs)
    if name in _LOOKUPS:
        yield _Indexed(given["indices"], _value(given["weight"]).shape[0])
    elif name == "one_hot":
        if given["num_classes"] > 0:
            yield _Indexed(given["self"], given["num_classes"])
    elif name in _BY_INDICES:
        at = 0
        for m in given["indices"]:
            mask = m is not None and str(_value(m).dtype) in ("torch.bool", "torch.uint8")
            if m is not None and not mask:
                yield _Indexed(m, _value(given["self"]).shape[at], from_end=True)
            at += _value(m).dim() if mask else 1  # a mask stands for as many dims as it has
    elif name in _LOSSES:
        if not _value(given["target"]).is_floating_point():  # otherwise they are probabilities of the classes
            scores = _value(given["self"]).shape
            yield _Indexed(given["target"], scores[min(1, len(scores) - 1)], ignored=given["ignore_index"])
    elif (shape := _value(given["self"]).shape) != ():
        yield _Indexed(given["index"], shape[given["dim"]])


def _outside(found: _Indexed, known: _KnownContents) -> int | None:
    """An index outside of its dim; None if there is none, or if the indices are not known."""
    indices = known.of(found.places)
    if indices is None or not indices.numel():
        return None
    if found.ignored is not None:
        indices = indices[indices != found.ignored]
        if not indices.numel():
            return None
    least, most = int(indices.min()), int(indices.max())
    if least < (-found.size if found.from_end else 0):
        return least
    return most if most >= found.size else None


@dataclass(frozen=True, kw_only=True)
class _KnownContents:
    """The contents of nodes that depend on no data.

    held: placeholder -> a tensor that the model holds. leaves: placeholder of a decomposition -> the outer node.
    module_of: node that stands for a tensor of a graph -> the module that has it.
    """

    held: Mapping[str, Tensor]
    leaves: Mapping[FxNode, FxNode]
    module_of: Mapping[FxNode, object]
    made: dict[FxNode, TorchOperand] = field(default_factory=dict)

    def of(self, n: FxNode) -> TorchOperand:
        """A node's tensor, or its list of tensors; None if it is not known."""
        if n not in self.made:
            self.made[n] = self._worked_out(n)
        return self.made[n]

    def _worked_out(self, n: FxNode) -> TorchOperand:
        if n in self.leaves:
            return self.of(self.leaves[n])
        if n.op == "placeholder":
            return _real(self.held.get(n.name))
        if n.op == "get_attr":
            return _real(getattr(self.module_of.get(n), str(n.target), None))
        return self._called(n) if n.op == "call_function" and not _too_large(n) else None

    def _called(self, n: FxNode) -> TorchOperand:
        import torch

        if n.target is operator.getitem:
            whole = self.of(n.args[0])
            return None if whole is None else whole[n.args[1]]
        tags = getattr(n.target, "tags", ())
        if not isinstance(n.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in tags:
            return None
        operands = {m: self.of(m) if reads_contents(n, m) else _blank(_value(m)) for m in n.all_input_nodes}
        if any(x is None for x in operands.values()):
            return None
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), operands.__getitem__)  # type: ignore[arg-type]
        try:
            with torch.no_grad():
                return applied(n, args, kwargs, torch.device("cpu"))
        except (
            NotImplementedError,
            RuntimeError,
            IndexError,
        ):  # it runs on other devices only, or is refused itself
            return None


def _value(n: FxNode) -> Tensor:
    return n.meta["val"]


def _too_large(n: FxNode) -> bool:
    import torch

    leaves = torch.utils._pytree.tree_leaves(n.meta.get("val"))
    return any(isinstance(x, torch.Tensor) and x.numel() > _MOST_ELEMENTS for x in leaves)


def _blank(x: Tensor) -> Tensor:
    import torch

    return torch.empty((), dtype=x.dtype).expand(x.shape)


def _real(x: object) -> Tensor | None:
    """A tensor that has contents and is small enough to look at, on the CPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if (
        not isinstance(x, torch.Tensor)
        or isinstance(x, FakeTensor)
        or x.is_meta
        or x.numel() > _MOST_ELEMENTS
    ):
        return None
    return x.detach().cpu()
