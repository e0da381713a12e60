"""Records a walk over an exported graph as a ``torch.fx`` graph: one rank's program, which then runs without the walk.

The recorder sees the calls of PyTorch's functions, above autograd. The recorded program is therefore differentiated as
the walk is. Functions of this package with a derivative of their own (an edge, a message, a recomputed block) are
recorded as one call (``whole``). What the walk decides in Python is decided once, when it is recorded.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from pase.errors import PaseError
from pase.frontends.torch.types import FxNode
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.fx import Graph, GraphModule

    from pase.frontends.torch.values import TorchOperand

__all__ = [
    "LAYER",
    "Drawn",
    "ProgramCall",
    "RecordedBlock",
    "Recording",
    "at_layer",
    "outside_blocks",
    "recorder",
    "seed_of",
    "whole",
]

LAYER = "pase_layer"
"""The note of a recorded node that has the user's layer."""


class Seeded(Protocol):
    """``rules.seeded``."""

    def __call__(self, seed: int, device: torch.device) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, eq=False)
class ProgramCall:
    """A call in a recorded graph of something that Python code cannot name.

    name: its name in the printed program.
    """

    run: Callable[..., Tree]
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.name)
        object.__setattr__(self, "__module__", "plan")  # the printed name is ``plan_name``

    def __call__(self, /, *args: TorchOperand, **kwargs: TorchOperand) -> Tree:
        return self.run(*args, **kwargs)


@dataclass(frozen=True)
class Drawn:
    """A function that draws random values. ``offset`` is added to the seed of the step."""

    run: Callable[..., Tree]
    offset: int
    device: torch.device
    seeded: Seeded

    def __call__(self, seed: int, /, *args: TorchOperand, **kwargs: TorchOperand) -> Tree:
        with self.seeded(seed + self.offset, self.device):
            return self.run(*args, **kwargs)


@dataclass(frozen=True)
class _Unwatched:
    """A function under ``torch.no_grad``."""

    run: Callable[..., Tree]

    def __call__(self, /, *args: TorchOperand, **kwargs: TorchOperand) -> Tree:
        import torch

        with torch.no_grad():
            return self.run(*args, **kwargs)


class Keeps(Protocol):
    """``interpreter.Keeping``."""

    now: bool

    def of(self, kept: bool) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True)
class _KeptCall:
    """An op of a recomputed block that keeps its result."""

    run: Callable[..., Tree]
    keeping: Keeps

    def __call__(self, /, *args: TorchOperand, **kwargs: TorchOperand) -> Tree:
        with self.keeping.of(True):
            return self.run(*args, **kwargs)


@dataclass(frozen=True)
class _Filled:
    """A function some of whose arguments cannot be in a graph (a body of a higher-order op, for example).

    form: the arguments, with a place for each tensor.
    """

    run: Callable[..., Tree]
    form: Any

    def __call__(self, *tensors: Tensor) -> Tree:
        mine = iter(tensors)
        args, kwargs = _mapped(self.form, lambda x: next(mine) if x is _PLACE else x)
        return self.run(*args, **kwargs)


_PLACE = object()


@dataclass(kw_only=True)
class Recording:
    """The state of a recording.

    base: the seed of the step that is recorded. Seeds are recorded relative to it.
    outer: the recording around this one, if it records a recomputed block.
    known: identity of a tensor -> (the tensor, which is kept alive, its node).
    held: name -> tensors that are part of the program.
    entered: what a recomputed block reads of the graph around it, with its inputs.
    keeping: whether the present op of a recomputed block keeps its result; None outside of such blocks.
    layer: the user's layer that is being walked.
    drawing: how the present op draws random values; None if it does not.
    """

    graph: Graph
    base: int
    device: torch.device
    outer: Recording | None = None
    known: dict[int, tuple[Tensor, FxNode]] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    entered: list[tuple[Tensor, FxNode]] = field(default_factory=list)
    keeping: Keeps | None = None
    layer: str = ""
    drawing: tuple[int, Seeded] | None = None
    seed: FxNode | None = None

    def enter(self, name: str, x: Tensor) -> None:
        """Add an input."""
        node = self.graph.placeholder(name)
        self.known[id(x)] = x, node
        node.meta["val"] = x

    def node(self, x: Tensor) -> FxNode:
        """The node that computes a tensor. A tensor that nothing recorded has computed is part of the program."""
        if id(x) in self.known:
            return self.known[id(x)][1]
        if self.outer is not None:
            node = self._lifted(x)
            self.entered.append((x, node))
        elif _is_fake(x):
            raise PaseError(
                f"a tensor of shape {list(x.shape)} is read that no recorded call computes",
                where="the program of a rank",
                fix="report this as a bug in pase.backends.torch",
            )
        else:
            name = f"constant_{len(self.held)}"
            self.held[name] = x
            with self.graph.inserting_before(self.first):
                node = self.graph.get_attr(name)
        node.meta["val"] = x
        self.known[id(x)] = x, node
        return node

    def _lifted(self, x: Tensor) -> FxNode:
        """A new input of a block, which the program around it computes."""
        with self.graph.inserting_before(self.first):
            return self.graph.placeholder(f"entering_{len(self.entered)}")

    @property
    def first(self) -> FxNode:
        """The first node that is no input."""
        return next(
            (n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), self.graph._root
        )

    def seed_node(self) -> FxNode:
        """The input that is the seed of the step."""
        if self.seed is None:
            with self.graph.inserting_before(next(iter(self.graph.nodes), self.graph._root)):
                self.seed = self.graph.placeholder("seed")
        return self.seed

    def note(
        self,
        func: Callable[..., Tree],
        args: Sequence[TorchOperand],
        kwargs: Mapping[str, TorchOperand],
        made: Tree,
        name: str = "",
    ) -> None:
        """Record a call that has just run, if it computed tensors."""
        import torch

        word = getattr(func, "__name__", "")
        if word == "__setitem__" or (word.endswith("_") and not word.endswith("__")):
            raise PaseError(
                f"'{word}' writes a tensor in place, which a recorded program does not do",
                where="the program of a rank",
                fix="report this as a bug in pase.backends.torch",
            )
        several = isinstance(made, (tuple, list))
        tensors = [x for x in (made if several else [made]) if isinstance(x, torch.Tensor)]
        if not tensors:
            return
        read: list[Tensor] = []
        odd = False

        def seen(x: TorchOperand) -> TorchOperand:
            nonlocal odd
            if isinstance(x, torch.Tensor):
                read.append(x)
            elif not _is_plain(x):
                odd = True
            return x

        _mapped((tuple(args), dict(kwargs)), seen)
        unwatched = not torch.is_grad_enabled() and any(x.requires_grad for x in read)
        kept = self.keeping is not None and self.keeping.now
        target, method = _target(func)
        if self.drawing is not None or unwatched or odd or kept:
            run = func
            if odd:
                form = _mapped(
                    (tuple(args), dict(kwargs)), lambda x: _PLACE if isinstance(x, torch.Tensor) else x
                )
                run, args, kwargs = _Filled(run, form), read, {}
            word = name or getattr(func, "__name__", type(func).__name__).replace(".", "_")
            target, method = ProgramCall(self._within(run, unwatched, kept), word), False
        elif name:
            target = ProgramCall(func, name)
        args, kwargs = _mapped((tuple(args), dict(kwargs)), lambda x: self._argument(x))
        if self.drawing is not None:
            args = (self.seed_node(), *args)
        node = self.graph.create_node("call_method" if method else "call_function", target, args, kwargs)
        node.meta |= {"val": made, LAYER: self.layer}
        if not several:
            self.known[id(made)] = made, node
            return
        for i, x in enumerate(made):
            if isinstance(x, torch.Tensor):
                part = self.graph.call_function(_getitem(), (node, i))
                part.meta |= {"val": x, LAYER: self.layer}
                self.known[id(x)] = x, part

    def _within(self, run: Callable[..., Tree], unwatched: bool, kept: bool) -> Callable[..., Tree]:
        """A function in the contexts in which the present op runs."""
        if unwatched:
            run = _Unwatched(run)
        if self.keeping is not None and kept:
            run = _KeptCall(run, self.keeping)
        if self.drawing is None:
            return run
        seed, how = self.drawing
        return Drawn(run, seed - self.base, self.device, how)

    def _argument(self, x: TorchOperand) -> TorchOperand:
        import torch

        return self.node(x) if isinstance(x, torch.Tensor) else x

    def returned(self, *outs: Tree) -> None:
        """End the graph, which returns these tensors."""
        self.graph.output(_mapped(tuple(outs), self._argument))

    def module(self, name: str) -> GraphModule:
        from torch.fx import GraphModule

        return GraphModule({k: x.to(self.device) for k, x in self.held.items()}, self.graph, name)

    # Recomputed blocks.

    def block(self, keeping: Keeps) -> Recording:
        """The recording of a recomputed block."""
        from torch.fx import Graph

        return Recording(
            graph=Graph(), base=self.base, device=self.device, outer=self, keeping=keeping, layer=self.layer
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record into this, and into nothing around it."""
        from torch.overrides import _pop_mode_temporarily

        with _pop_mode_temporarily() if self.outer is not None else contextlib.nullcontext(), _mode()(self):
            yield

    def call_of(
        self, block: Recording, how: Callable[[Callable[[], Tree]], Tree], made: Sequence[Tensor], name: str
    ) -> None:
        """Record the call of a block. how: runs it so that backward recomputes it. made: its results."""
        read = [x for x, _ in block.entered]
        seeds = [] if block.seed is None else [self.seed_node()]
        node = self.graph.call_function(
            ProgramCall(RecordedBlock(block.module(name), how), name), (*seeds, *(self.node(x) for x in read))
        )
        node.meta |= {"val": list(made), LAYER: self.layer}
        for i, x in enumerate(made):
            part = self.graph.call_function(_getitem(), (node, i))
            part.meta |= {"val": x, LAYER: self.layer}
            self.known[id(x)] = x, part


@dataclass(frozen=True)
class RecordedBlock:
    """A recomputed block of a recorded program."""

    module: GraphModule
    how: Callable[[Callable[[], Tree]], Tree]

    def __call__(self, *args: TorchOperand) -> Tree:
        def inside() -> Tree:
            arrays, carried = self.module(*args)
            return [*arrays, *carried]

        return self.how(inside)


def _is_fake(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


@cache
def _getitem() -> Callable[..., Tree]:
    import operator

    return operator.getitem


def _mapped(x: Any, how: Callable[[Any], Any]) -> Any:
    """A structure of tuples, lists, dicts and slices with ``how`` of each leaf. Other kinds of tuples become tuples."""
    if isinstance(x, (list, tuple)):
        return [_mapped(y, how) for y in x] if isinstance(x, list) else tuple(_mapped(y, how) for y in x)
    if isinstance(x, dict):
        return {k: _mapped(v, how) for k, v in x.items()}
    if isinstance(x, slice):
        return slice(_mapped(x.start, how), _mapped(x.stop, how), _mapped(x.step, how))
    return how(x)


def _is_plain(x: object) -> bool:
    """Whether Python code can name an argument."""
    import torch

    kinds = (str, int, float, bool, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return x is None or x is Ellipsis or isinstance(x, kinds)


def _target(func: Callable[..., Tree]) -> tuple[Any, bool]:
    """(the target of a node that calls the function, whether it is a method)."""
    import torch

    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property of tensors
        of = getattr(func, "__self__", None)
        attribute = getattr(of, "__name__", "")
        return ProgramCall(lambda x, *_: getattr(x, attribute), attribute), False
    if name and getattr(torch.Tensor, name, None) is func:
        return name, True
    if isinstance(func, types.MethodType) or not (name and hasattr(func, "__module__")):
        return ProgramCall(func, (name or type(func).__name__).replace(".", "_")), False
    return func, False


@cache
def _mode() -> type:
    """The class of the mode. It is created on first use, because it needs PyTorch."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __init__(self, recording: Recording) -> None:
            super().__init__()
            self.recording = recording

        def __torch_function__(
            self,
            func: Callable[..., Tree],
            types: object,
            args: Sequence[TorchOperand] = (),
            kwargs: Mapping[str, TorchOperand] | None = None,
        ) -> Tree:
            made = func(*args, **(kwargs or {}))
            self.recording.note(func, args, kwargs or {}, made)
            return made

    return Mode


def recorder() -> Recording | None:
    """The present recording; None if nothing is recorded."""
    from torch.overrides import _get_current_function_mode

    mode = _get_current_function_mode()
    found = None if mode is None else vars(mode).get("recording")
    return found if isinstance(found, Recording) else None


def whole(run: Callable[..., Tree], *args: TorchOperand, name: str) -> Tree:
    """``run(*args)``, which is recorded as one call. name: in the recorded program."""
    into = recorder()
    if into is None:
        return run(*args)
    from torch.overrides import _pop_mode_temporarily

    with _pop_mode_temporarily():
        made = run(*args)
        if any(made is x for x in args):  # it is another tensor for what reads the call
            made = made.view_as(made)
    into.note(run, args, {}, made, name)
    return made


@contextlib.contextmanager
def outside_blocks() -> Iterator[None]:
    """Record outside of recomputed blocks. Their results are then there for all blocks."""
    into = root = recorder()
    while root is not None and root.outer is not None:
        root = root.outer
    if root is None or root is into:
        yield
        return
    from torch.overrides import _pop_mode_temporarily

    with _pop_mode_temporarily(), _mode()(root):
        yield


def seed_of(seed: int, how: Seeded) -> contextlib.AbstractContextManager[None]:
    """A context for a call that draws random values with a seed."""
    into = recorder()
    return contextlib.nullcontext() if into is None else _drawing(into, seed, how)


@contextlib.contextmanager
def _drawing(into: Recording, seed: int, how: Seeded) -> Iterator[None]:
    before, into.drawing = into.drawing, (seed, how)
    try:
        yield
    finally:
        into.drawing = before


@contextlib.contextmanager
def at_layer(layer: Callable[[], str]) -> Iterator[None]:
    """Record the user's layer of the calls in this context."""
    into = recorder()
    if into is None:
        yield
        return
    before, into.layer = into.layer, layer()
    try:
        yield
    finally:
        into.layer = before
