"""Functions of Flax NNX modules, which are mutable objects, as pure functions of the modules' Variables.

The parameters of the pure function are the ``nnx.Param`` of the first argument, as in ``nnx.value_and_grad``. All other
Variables (random streams, batch statistics, caches, another module's weights) are its last argument, the *state*. After
what the user's function returns, the pure function returns the next value of each Variable that was written. A module's
state is therefore one more value that a call passes to the next, and no other code has to know about modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pase.errors import PaseError
from pase.frontends.jax import leaves as jax_leaves
from pase.frontends.jax.structure import check_structure
from pase.frontends.signature import argument_names
from pase.pytree import Tree

if TYPE_CHECKING:
    from flax import nnx
    from jax.tree_util import PyTreeDef

__all__ = ["Advanced", "ModuleFunction", "Opened", "has_modules", "opened", "without_variables"]

_Inside = tuple[object, ...]


class Advanced(NamedTuple):
    """The next values of Variables, in the structure of the pure function's arguments; None if not written."""

    state: Tree
    params: Tree


def has_modules(tree: Tree) -> bool:
    """Whether a pytree contains a Flax NNX module (or ``nnx.Rngs``, ``nnx.Metric``, …). It does not import Flax."""
    import jax

    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def _is_module(x: object) -> bool:
    from flax import nnx

    return isinstance(x, nnx.Pytree)


def _is_variable(x: object) -> bool:
    from flax import nnx

    return isinstance(x, nnx.Variable)


def _is_none(x: object) -> bool:
    return x is None


def without_variables(tree: Tree) -> Tree:
    """The tree with Variables, such as those in an optimizer's state, replaced by their values."""
    import jax

    return jax.tree.map(lambda x: x.get_raw_value() if _is_variable(x) else x, tree, is_leaf=_is_variable)


@dataclass(frozen=True, kw_only=True)
class _ModuleArray:
    """An array of a module: the module's number, and the array's path in it."""

    module: int
    path: _Inside
    trained: bool
    """Whether it belongs to an ``nnx.Param`` of the first argument."""

    def __str__(self) -> str:
        return ".".join(map(str, self.path))


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The structure of one argument, in which modules are leaves."""

    tree: PyTreeDef
    """The treedef, with a leaf for each module."""
    modules: tuple[int | None, ...]
    """For each leaf, the number of its module; None for other leaves."""

    @classmethod
    def of(cls, arg: Tree, before: int) -> _Frame:
        """The frame of an argument. before: the number of modules in the arguments before it."""
        import jax

        leaves, tree = jax.tree.flatten(arg, is_leaf=_is_module)
        numbers = iter(range(before, before + len(leaves)))
        return cls(tree=tree, modules=tuple(next(numbers) if _is_module(x) else None for x in leaves))

    @property
    def count(self) -> int:
        return sum(k is not None for k in self.modules)

    def parts(self, tree: Tree) -> list[Tree]:
        """The leaves of the argument. The part in place of a module is one leaf."""
        return [tree] if self.tree.num_nodes == 1 else self.tree.flatten_up_to(tree)

    def filled(self, tree: Tree, modules: Sequence[Tree]) -> Tree:
        """The tree with these modules, or what replaces them, in the modules' places."""
        import jax

        mine = zip(self.parts(tree), self.modules, strict=True)
        return jax.tree.unflatten(self.tree, [x if k is None else modules[k] for x, k in mine])


@dataclass(frozen=True, kw_only=True)
class _ModuleGraph:
    """What ``nnx.split`` returns for several modules, except their arrays."""

    graphdef: nnx.GraphDef[tuple[object, ...]]
    tree: PyTreeDef
    """The treedef of their ``nnx.State``, whose leaves are the arrays."""
    leaves: tuple[_ModuleArray, ...]
    count: int
    """The number of modules."""

    def merged(self, arrays: Sequence[Tree]) -> tuple[object, ...]:
        """New modules with these arrays."""
        import jax
        from flax import nnx

        return nnx.merge(self.graphdef, jax.tree.unflatten(self.tree, arrays))

    def parts(self, values: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
        """The trained and the other values of each module, each as an ``nnx.State`` without Variables."""
        from flax import nnx

        mine: list[dict[object, Tree]] = [{} for _ in range(self.count)]
        rest: list[dict[object, Tree]] = [{} for _ in range(self.count)]
        for leaf, x in zip(self.leaves, values, strict=True):
            _put((mine if leaf.trained else rest)[leaf.module], leaf.path, x)
        return [nnx.State(x) for x in mine], [nnx.State(x) for x in rest]

    def values(self, trained: Sequence[Tree], rest: Sequence[Tree]) -> list[Tree]:
        """The inverse of ``parts``. A part that is None has None for all its values."""
        import jax

        out: list[Tree] = [None] * len(self.leaves)
        for part, order in zip((trained, rest), self.parts(range(len(self.leaves))), strict=True):
            for given, numbers in zip(part, order, strict=True):
                if given is not None:
                    of = zip(jax.tree.leaves(numbers), jax.tree.leaves(given, is_leaf=_is_none), strict=True)
                    for i, x in of:
                        out[i] = x
        return out

    def variables(self, values: Sequence[Tree]) -> Iterator[tuple[int, _Inside, Tree, bool, bool]]:
        """Yields (module, path, Variable with its value, whether it is trained, whether it has a value) for each
        Variable."""
        import jax

        state = jax.tree.unflatten(self.tree, values)
        numbers = jax.tree.unflatten(self.tree, range(len(self.leaves)))
        # An array that is not in a Variable is itself None if it has no value, which jax.tree would not count as a
        # leaf.
        pairs = (
            jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda x: _is_variable(x) or _is_none(x))[0]
            for x in (state, numbers)
        )
        for (path, variable), (_, at) in zip(*pairs, strict=True):
            mine = jax.tree.leaves(at)
            module, *inside = _keys(path)
            known = any(values[i] is not None for i in mine)
            yield module, tuple(inside), variable, any(self.leaves[i].trained for i in mine), known  # type: ignore[misc]


def _put(tree: dict[object, Tree], path: _Inside, x: Tree) -> None:
    *outer, last = path
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = x


def _keys(path: _Inside) -> _Inside:
    return tuple(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)


def _split(modules: Sequence[object], trained: int) -> tuple[_ModuleGraph, list[Tree]]:
    """The structure and the arrays of modules. trained: the number of modules that belong to the first argument."""
    import jax
    from flax import nnx

    graphdef, state = nnx.split(tuple(modules))
    leaves: list[_ModuleArray] = []
    for path, variable in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)[0]:
        module, *inside = _keys(path)
        assert isinstance(module, int)  # the modules are a tuple
        if getattr(variable, "hijax", False) or getattr(variable, "ref", False):
            raise PaseError(
                "it is a mutable array (ref=True or hijax=True), but pase reads only Variables of the default kind",
                where=f"the Variable {'.'.join(map(str, inside))}",
                fix="create it without ref and hijax",
            )
        mine = module < trained and isinstance(variable, nnx.Param)
        for deeper, _ in jax.tree_util.tree_flatten_with_path(variable)[0]:
            within = deeper[1:] if _is_variable(variable) else deeper  # the first key is the Variable's own
            leaves.append(_ModuleArray(module=module, path=(*inside, *_keys(within)), trained=mine))
    arrays, tree = jax.tree.flatten(state)
    return _ModuleGraph(graphdef=graphdef, tree=tree, leaves=tuple(leaves), count=len(modules)), arrays


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Arguments whose modules were split into arrays."""

    modules: tuple[object, ...]
    """The user's own objects."""
    params: Tree
    batch: tuple[Tree, ...]
    """The batch, with None in place of each module."""
    state: Tree

    @property
    def arguments(self) -> tuple[Tree, ...]:
        """The arguments of the pure function."""
        return self.params, *self.batch, self.state


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleFunction:
    """A user's function of modules as a pure function: f(params, *batch, state) -> (the user's result, Advanced).

    For a loss, the next values come after everything that the function returns, so that the loss stays first.

    params: the first argument, with an ``nnx.State`` of arrays in place of each module.
    state: such a State of the other Variables, or a tuple of States if there are several modules.
    """

    fn: Callable[..., Tree]
    mode: str
    frames: tuple[_Frame, ...]
    """The structure of each argument of the user's function."""
    graphs: Mapping[int, _ModuleGraph]
    """Number of arguments -> the modules in that many of the first arguments."""
    constant: frozenset[int] = frozenset()
    """Arrays that keep their value although a loop or a call inside the function returns them."""

    @classmethod
    def of(cls, fn: Callable[..., Tree], mode: str, args: Sequence[Tree]) -> ModuleFunction:
        """Builds the pure function. args: the example arguments, of which at least one contains a module."""
        frames: list[_Frame] = []
        for arg in args:
            frames.append(_Frame.of(arg, sum(f.count for f in frames)))
        modules = _modules_in(args)
        graphs = {
            n: _split(modules[: sum(f.count for f in frames[:n])], frames[0].count)[0]
            for n in range(1, len(args) + 1)
        }
        return cls(fn=fn, mode=mode, frames=tuple(frames), graphs=graphs)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def argument_names(self, count: int) -> tuple[str, ...]:
        names = argument_names(self.fn, count - 1)
        return (*names, "variables" if "variables" not in names else "other_variables")

    @cached_property
    def graph(self) -> _ModuleGraph:
        """The structure of all modules."""
        return self.graphs[len(self.frames)]

    def carry(self, carry: Mapping[int, Tree] | None) -> dict[int, Tree]:
        """What a call passes to the next: what the user specified, and the Variables."""
        given = {k: at if isinstance(at, tuple) else (at,) for k, at in (carry or {}).items()}
        if self.mode != "train":
            given = {k: (0, *at) for k, at in given.items()}
        return given | {len(self.frames) - 1: (-1, 0), -1: (-1, 1)}

    def __call__(self, params: Tree, *rest: Tree) -> Tree:
        *batch, state = rest
        graph, mine = self.graph, self.frames[0].count
        modules = graph.merged(self._values(graph, params, state))
        _, before = _split(modules, mine)
        out = self.fn(*self.closed(modules, params, *batch))
        if has_modules(out):
            raise PaseError(
                "it returns a Flax NNX module, whose Variables are returned in any case, as with nnx.jit",
                where=self.__name__,
                fix="return arrays, such as nnx.state(module)",
            )
        made, after = _split(modules, mine)
        _check_same(graph, made, self.__name__)
        _check_arrays(graph, before, after, self.__name__)
        pairs = enumerate(zip(before, after, strict=True))
        written = [None if y is x or i in self.constant else y for i, (x, y) in pairs]
        advanced = Advanced(*reversed(self._arguments(graph, params, written)))
        if self.mode != "train":
            return out, advanced
        if isinstance(out, tuple):
            return *out, advanced
        loss, aux = jax_leaves.loss_and_aux(out)
        return (loss, advanced) if aux is None else (loss, aux, advanced)

    def returned(self, value: Tree, has_aux: bool) -> tuple[Tree, Advanced | None]:
        """Splits the pure function's result into the user's result and the next values."""
        if self.mode != "train":
            out, advanced = value
            return out, advanced
        if not has_aux:
            return value, None
        loss, aux = value
        if isinstance(aux, Advanced):
            return loss, aux
        *others, advanced = aux
        return (loss, others[0] if len(others) == 1 else tuple(others)), advanced

    def handed_on(self, in_tree: PyTreeDef, same: Mapping[int, int | None]) -> frozenset[int]:
        """The numbers of the arrays whose next value is their old value.

        same: input leaf of the pure function -> the input leaf that its next value equals.
        """
        import jax

        params, *_, state = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
        numbers = self._values(self.graph, params, state)
        return frozenset(k for k, i in enumerate(numbers) if same.get(i) == i)

    def open(self, *args: Tree) -> Opened:
        """Splits the modules of the user's arguments, or of the first of them, into arrays. Raises PaseError if they
        differ from the modules that the function was compiled with."""
        frames = self.frames[: len(args)]
        for i, (frame, arg) in enumerate(zip(frames, args, strict=True)):
            given, where = (
                _Frame.of(arg, sum(f.count for f in frames[:i])),
                f"argument {i} of {self.__name__}",
            )
            fix = "pass an argument of the structure that was compiled, or compile another plan"
            check_structure(given.tree, frame.tree, where=where, fix=fix)
            if given.modules != frame.modules:
                raise PaseError(
                    "its modules are in other places than in the compiled argument", where=where, fix=fix
                )
        modules = _modules_in(args)
        graph, values = _split(modules, frames[0].count)
        _check_same(self.graphs[len(args)], graph)
        params, state = self._arguments(graph, args[0], values)
        none = [None] * len(modules)
        batch = tuple(f.filled(arg, none) for f, arg in zip(frames[1:], args[1:], strict=True))
        return Opened(modules=modules, params=params, batch=batch, state=state)

    def open_all(self, args: Sequence[Tree]) -> Opened:
        """Like ``open``, for all of the user's arguments."""
        if len(args) != len(self.frames):
            raise PaseError(
                f"it takes {len(self.frames)} arguments, but got {len(args)}",
                where=self.__name__,
                fix="pass the arguments that the plan was compiled for",
            )
        return self.open(*args)

    def closed(self, modules: Sequence[object], *args: Tree) -> tuple[Tree, ...]:
        """The arguments, or the first of them, with the modules in their places."""
        return tuple(f.filled(x, modules) for f, x in zip(self.frames, args, strict=False))

    def rebuilt(self, params: Tree, batch: Sequence[Tree], state: Tree) -> tuple[Tree, ...]:
        """The arguments, or the first of them, with new modules."""
        graph = self.graphs[1 + len(batch)]
        return self.closed(graph.merged(self._values(graph, params, state)), params, *batch)

    def first(self, count: int, params: Tree, state: Tree) -> Tree:
        """The part of ``state`` that belongs to the first ``count`` arguments, in the form that ``open`` returns."""
        of = dict(zip(self.graph.leaves, self._values(self.graph, params, state), strict=True))
        graph = self.graphs[count]
        return self._arguments(graph, params, [of[leaf] for leaf in graph.leaves])[1]

    def update(self, modules: Sequence[object], advanced: Advanced | None) -> None:
        """Writes the next values into the user's modules."""
        from flax import nnx

        if advanced is None:
            return
        values = self._values(self.graph, advanced.params, advanced.state)
        new: dict[object, Tree] = {}
        for module, path, variable, _, known in self.graph.variables(values):
            if known:
                _put(new, (module, *path), variable)
        nnx.update(tuple(modules), nnx.State(new))

    def with_variables(self, params: Tree) -> Tree:
        """Returns a tree in the structure of the pure function's params, such as gradients, with the user's kinds of
        Variables in it."""
        values = self._values(self.graph, params, None)
        return self._filtered(values, params, only_trained=True)

    def as_states(self, params: Tree, state: Tree) -> Tree:
        """The first argument with an ``nnx.State`` of all Variables in place of each module."""
        return self._filtered(self._values(self.graph, params, state), params, only_trained=False)

    def of_states(self, arg: Tree) -> Tree:
        """The inverse of ``as_states``."""
        import jax

        frame = self.frames[0]
        states = [x for x, k in zip(frame.parts(arg), frame.modules, strict=True) if k is not None]
        return frame.filled(arg, self.graphs[1].merged(jax.tree.leaves(states)))

    def _filtered(self, values: Sequence[Tree], params: Tree, only_trained: bool) -> Tree:
        from flax import nnx

        found: list[dict[object, Tree]] = [{} for _ in range(self.graph.count)]
        for module, path, variable, mine, _ in self.graph.variables(values):
            if mine or not only_trained:
                _put(found[module], path, variable)
        return self.frames[0].filled(params, [nnx.State(x) for x in found])

    def _arguments(self, graph: _ModuleGraph, arg: Tree, values: Sequence[Tree]) -> tuple[Tree, Tree]:
        """The pure function's params and state. arg: the first argument, whose other leaves are used."""
        trained, rest = graph.parts(values)
        return self.frames[0].filled(arg, trained), rest[0] if graph.count == 1 else tuple(rest)

    def _values(self, graph: _ModuleGraph, params: Tree, state: Tree) -> list[Tree]:
        """The arrays of modules, from the pure function's params and state; None wherever these have None."""
        frame = self.frames[0]
        trained: list[Tree] = [None] * graph.count
        for x, k in zip(frame.parts(params), frame.modules, strict=True):
            if k is not None:
                trained[k] = x
        rest = [None] * graph.count if state is None else [state] if graph.count == 1 else list(state)
        return graph.values(trained, rest)


def _modules_in(args: Sequence[Tree]) -> tuple[object, ...]:
    import jax

    return tuple(filter(_is_module, jax.tree.leaves(tuple(args), is_leaf=_is_module)))


def opened(
    fn: Callable[..., Tree], mode: str, carry: Mapping[int, Tree] | None, args: tuple[Tree, ...]
) -> tuple[Callable[..., Tree], Mapping[int, Tree] | None, tuple[Tree, ...]]:
    """Returns the function, carry and arguments unchanged, or those of the pure function if an argument contains a
    module."""
    if not has_modules(args):
        return fn, carry, args
    pure = ModuleFunction.of(fn, mode, args)
    return pure, pure.carry(carry), pure.open(*args).arguments


def _check_same(wanted: _ModuleGraph, got: _ModuleGraph, called: str | None = None) -> None:
    """Raises PaseError if modules differ from those that were compiled. called: the function that changed them."""
    if wanted.graphdef == got.graphdef and wanted.leaves == got.leaves:
        return
    was, is_ = ({str(leaf) for leaf in g.leaves} for g in (wanted, got))
    found = [f"new: {', '.join(sorted(new))}"] if (new := is_ - was) else []
    found += [f"missing: {', '.join(sorted(gone))}"] if (gone := was - is_) else []
    what = (
        "; ".join(found or _changed(wanted, got))
        or "it shares other Variables, or contains other kinds of them"
    )
    if called is None:
        raise PaseError(
            f"the module is not as the plan was compiled ({what}); a plan is for one set of Variables and attributes, "
            f"and for one of the train and eval modes",
            fix="compile one plan for each",
        )
    raise PaseError(
        f"it changes the module itself and not only the values of its Variables ({what})",
        where=called,
        fix="make this change before pase.compile (model.train(), caches, what the first call creates), or undo it at "
        "the end of the function (nnx.pop for intermediates)",
    )


def _check_arrays(graph: _ModuleGraph, before: Sequence[Tree], after: Sequence[Tree], called: str) -> None:
    for leaf, x, y in zip(graph.leaves, before, after, strict=True):
        was, is_ = (f"{a.dtype}{list(a.shape)}" for a in (x, y))
        if was != is_:
            raise PaseError(
                f"it changes {leaf} from {was} to {is_}, but a plan is for one shape and dtype",
                where=called,
                fix="cast the new value, or make the change before pase.compile",
            )


def _changed(wanted: _ModuleGraph, got: _ModuleGraph) -> list[str]:
    """Describes the first attributes that differ."""
    pairs = zip(
        getattr(wanted.graphdef, "attributes", ()), getattr(got.graphdef, "attributes", ()), strict=False
    )
    differ = [(a, b) for a, b in pairs if a != b]
    return [f"{a[0]}: {_text(a[1])} became {_text(b[1])}" for a, b in differ[:3]]


def _text(attribute: object) -> str:
    return str(getattr(attribute, "value", attribute))
