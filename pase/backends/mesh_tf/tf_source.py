"""Walks a TensorFlow graph a second time, op by op, in the order of ``frontends/tf/lower``.

Calls are inlined, values that do not depend on data are computed, and loops with a known trip count are unrolled. The
ops of every iteration have the names of the plan's single body. Lists of tensors are Python lists. Reading and writing
them, and loop carries, are ops that only pase has (``pase:same``, ``pase:take``, ``pase:stack``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pase.backends.mesh_tf.program import Input, SourceOp
from pase.errors import PaseError
from pase.frontends.tf.frontend import TracedTf
from pase.frontends.tf.graph import CALLS, TfBody, TfNode, dtype_name
from pase.frontends.tf.known import evaluate
from pase.frontends.tf.lower import PASSED_ON
from pase.frontends.tf.sources import Variable
from pase.ir import Place, PlacePart

__all__ = ["source_ops"]

_MOST_TRIPS = 2048
_READ_BY_ITERATIONS: tuple[PlacePart, ...] = ("carry", "const")
_EFFECTS = frozenset({"NoOp", "Assert", "ControlTrigger", "AssignVariableOp", "AssignAddVariableOp", "Const"})
_VARIABLES = frozenset({"VarHandleOp", "VariableV2", "Variable", "AutoReloadVariable"})


@dataclass(frozen=True)
class _List:
    """A list of tensors: its elements by index, or one stacked tensor with all elements."""

    length: int | None
    elements: Mapping[int, Input] = field(default_factory=dict)
    stacked: Input | None = None


_WalkedValue = Input | _List | None


def source_ops(traced: TracedTf, roles: Mapping[str, str]) -> Iterator[SourceOp]:
    """The ops of the model, in order. roles: tensor -> its role in the plan's graph."""
    walk = _GraphWalk(traced)
    by_path = {t.path: t for t in traced.graph.tensors.values() if t.role in ("parameter", "input")}

    def leaf(path: str) -> Input:
        t = by_path[path]
        return Input(tensor=t.name, shape=tuple(map(int, t.shape)), dtype=t.dtype)  # type: ignore[call-overload]

    env: dict[str, _WalkedValue] = {}
    for ref, v in traced.source.captured.items():
        if isinstance(v, Variable) and v.path in by_path:
            env[ref] = leaf(v.path)
    for ref, spec in traced.source.inputs.items():
        env[ref] = leaf(spec.name) if spec.name in by_path else None
    yield from walk.body(traced.program.main, [env.get(ref) for ref in traced.program.main.args], "", [])


def _known(array: np.ndarray, tensor: str = "") -> Input:
    return Input(tensor=tensor or None, value=array, shape=array.shape, dtype=str(array.dtype))


@dataclass
class _GraphWalk:
    traced: TracedTf
    snapshots: int = 0
    written: dict[Place, list[str]] = field(default_factory=dict)
    """Op -> the tensors of the raw graph that its loop nests write, in order."""

    def __post_init__(self) -> None:
        for n in self.traced.graph.nodes:
            for op in n.ops:
                self.written.setdefault(op.eqn, []).extend(a.tensor for a in op.writes)

    def body(
        self, body: TfBody, args: Sequence[_WalkedValue], prefix: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        """Yield the body's ops. Appends its outputs to ``out``."""
        env: dict[str, _WalkedValue] = dict(zip(body.args, args, strict=False))
        for node in body.nodes:
            path = f"{prefix}{node.name}"
            ins = [env.get(ref) for ref in node.inputs]
            made: list[_WalkedValue] = []
            yield from self.node(node, ins, path, made)
            for k, v in enumerate(made):
                env[f"{node.name}:{k}"] = v
        out += [env.get(ref) for ref in body.outputs]

    def names(self, at: Place) -> tuple[str, ...]:
        return self.traced.results.get(at, ())

    def node(
        self, node: TfNode, ins: Sequence[_WalkedValue], path: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        op, names = node.op, self.names(Place(path))
        if op == "Const":
            frozen = names and names[0] and self.traced.graph.tensors[names[0]].role == "parameter"
            out.append(self.tensor(names[0]) if frozen else _constant(node, names[0] if names else ""))
        elif op in CALLS or op in self.traced.program.library:
            (name,) = self.traced.program.called(node)
            yield from self.body(self.traced.program.body(name), ins, f"{path}/", out)
        elif op in ("While", "StatelessWhile"):
            yield from self.loop(node, ins, path, out)
        elif op in ("If", "StatelessIf", "Case", "StatelessCase"):
            yield from self.branch(node, ins, path, out)
        elif op in _VARIABLES:
            variable = self.traced.source.variables.get(node.name)
            out.append(self._leaf(variable.path) if variable is not None else None)
        elif op in _EFFECTS:
            pass
        elif op == "IdentityN":
            out += ins
        elif op in PASSED_ON or op == "ReadVariableOp":
            out.append(ins[0] if ins else None)
        elif op.startswith("TensorList") or op == "EmptyTensorList":
            yield from self.list_op(node, ins, path, out)
        elif op in ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"):
            out += self.shapes(node, ins, names)
        elif ins and all(isinstance(v, Input) and v.value is not None for v in ins):
            arrays = [v.value for v in ins if isinstance(v, Input) and v.value is not None]
            made = evaluate(node, arrays) or _run(node, arrays, path)
            out += [_known(a, names[k] if k < len(names) else "") for k, a in enumerate(made)]
        else:
            yield from self.plain(node, ins, path, out)

    def _leaf(self, path: str) -> Input:
        t = next(t for t in self.traced.graph.tensors.values() if t.path == path)
        return self.tensor(t.name)

    def tensor(self, name: str) -> Input:
        t = self.traced.graph.tensors[name]
        return Input(tensor=name, shape=tuple(map(int, t.shape)), dtype=t.dtype)  # type: ignore[call-overload]

    def plain(
        self, node: TfNode, ins: Sequence[_WalkedValue], path: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        names = self.names(Place(path))
        inputs = []
        for k, v in enumerate(ins):
            if not isinstance(v, Input):
                what = "a list of tensors" if isinstance(v, _List) else "not a tensor of the model"
                raise PaseError(
                    f"the op cannot be in a Mesh-TensorFlow program: operand {k} is {what}",
                    where=f"'{node.op}' at {path}",
                )
            inputs.append(v)
        made: list[Input | None] = [self.tensor(n) if n else None for n in names]
        if inputs and names and names[0] and inputs[0].named(names[0]):
            out.append(
                made[0]
            )  # a cast to the same type, a reduction over no dims, a reshape and its inverse
            return
        shape = _reshaped(node, inputs)
        if shape is not None and names:  # the frontend may have omitted this reshape, and readers ignore it
            if node.op == "Reshape":
                source = inputs[0].behind or inputs[0].tensor
            else:
                source = next(
                    (t for t in reversed(self.written.get(Place(path), [])) if t != names[0]),
                    names[0] or None,
                )
            if not names[0]:
                made[0] = Input(tensor=source, shape=shape, dtype=inputs[0].dtype, behind=source)
                if node.op == "Reshape":
                    out += made
                    return
            elif made[0] is not None:
                made[0] = replace(made[0], behind=source)
        out += made
        yield SourceOp(
            at=Place(path),
            name=node.op,
            label=path,
            inputs=tuple(inputs),
            outputs=names,
            shapes=tuple(m.shape if m else () for m in made),
            dtypes=tuple(m.dtype if m else inputs[0].dtype for m in made),
            attrs=_Attributes(node),
        )

    def own(
        self,
        name: str,
        at: Place | None,
        inputs: Sequence[Input],
        made: str,
        shape: Sequence[int],
        **attrs: Any,
    ) -> SourceOp:
        """An op that only pase has. It computes a tensor with the name ``made``."""
        dtype = inputs[0].dtype
        return SourceOp(
            at=at,
            name=f"pase:{name}",
            label=str(at or name),
            inputs=tuple(inputs),
            outputs=(made,),
            shapes=(tuple(shape),),
            dtypes=(dtype,),
            attrs=attrs,
        )

    def shapes(self, node: TfNode, ins: Sequence[_WalkedValue], names: Sequence[str]) -> list[_WalkedValue]:
        out: list[_WalkedValue] = []
        for k, v in enumerate(ins):
            if not isinstance(v, Input):
                return [None]
            name = names[k] if k < len(names) else ""
            if node.op in ("ZerosLike", "OnesLike"):
                out.append(_known(np.full(v.shape, float(node.op == "OnesLike")).astype(v.dtype), name))
                continue
            kind = dtype_name(node.attr["out_type"].type) if "out_type" in node.attr else "int32"
            value: Any = v.shape if node.op.startswith("Shape") else len(v.shape)
            value = int(np.prod(v.shape, dtype=np.int64)) if node.op == "Size" else value
            out.append(_known(np.array(value, kind), name))
        return out

    # --- loops, branches, lists

    def loop(
        self, node: TfNode, ins: Sequence[_WalkedValue], path: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        condition, body = (self.traced.program.body(n) for n in self.traced.program.called(node))
        at, now = Place(path), list(ins)
        for iteration in range(_MOST_TRIPS + 1):
            answer: list[_WalkedValue] = []
            for op in self.body(condition, now, f"{path}/cond/", answer):
                raise _data(node, path, f"the number of its iterations depends on data ({op.where})")
            go = answer[0]
            if not isinstance(go, Input) or go.value is None:
                raise _data(node, path, "the number of its iterations depends on data")
            if not go.value.reshape(()):
                break
            if iteration == _MOST_TRIPS:
                raise _data(node, path, f"it has more than {_MOST_TRIPS} iterations, and loops are unrolled")
            for k, v in enumerate(now):  # an iteration's inputs have the names of the plan's loop
                for kind in _READ_BY_ITERATIONS:
                    names = self.names(at.its(kind, k))
                    if names and isinstance(v, Input):
                        yield self.own("same", at.its(kind, k), [v], names[0], v.shape)
                        now[k] = self.tensor(names[0])
                names = self.names(at.its("xs", k))
                if names and isinstance(v, _List) and v.stacked is not None and v.stacked.tensor != names[0]:
                    yield self.own("same", at.its("xs", k), [v.stacked], names[0], v.stacked.shape)
                    now[k] = replace(v, stacked=self.tensor(names[0]))
            after: list[_WalkedValue] = []
            yield from self.body(body, now, f"{path}/", after)
            now = after
        for k, v in enumerate(now):
            names = self.names(at.its("carry", k))
            if names and isinstance(v, Input) and v.tensor != names[0]:
                yield self.own("same", at.its("carry", k), [v], names[0], v.shape)
                now[k] = self.tensor(names[0])
        out += now

    def branch(
        self, node: TfNode, ins: Sequence[_WalkedValue], path: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        choice = ins[0]
        if not isinstance(choice, Input) or choice.value is None:
            raise _data(node, path, "which branch is taken depends on data")
        names = self.traced.program.called(node)
        k = int(choice.value.reshape(()))
        k = (0 if k else 1) if node.op.endswith("If") else min(max(k, 0), len(names) - 1)
        yield from self.body(self.traced.program.body(names[k]), ins[1:], f"{path}/", out)

    def list_op(
        self, node: TfNode, ins: Sequence[_WalkedValue], path: str, out: list[_WalkedValue]
    ) -> Iterator[SourceOp]:
        op, names = node.op, self.names(Place(path))
        if op in ("TensorListReserve", "EmptyTensorList"):
            size = ins[1].value if op == "TensorListReserve" and isinstance(ins[1], Input) else None
            out.append(_List(None if size is None else int(size.reshape(()))))
            return
        if op == "TensorListFromTensor":
            (x, *_) = ins
            assert isinstance(x, Input)
            out.append(_List(x.shape[0], stacked=x))
            return
        held = ins[0]
        if not isinstance(held, _List):
            raise _data(node, path, "its operand is not a list of tensors")
        if op == "TensorListLength":
            out.append(_known(np.array(held.length or len(held.elements), np.int32)))
        elif op == "TensorListElementShape":
            some = next(iter(held.elements.values()), None)
            shape = some.shape if some is not None else held.stacked.shape[1:] if held.stacked else ()
            out.append(_known(np.array(shape, np.int32)))
        elif op == "TensorListGetItem":
            at = _index(node, ins[1], path)
            if held.stacked is None:
                out.append(held.elements[at])
            elif held.stacked.value is not None:
                out.append(_known(held.stacked.value[at]))
            else:
                made = self.tensor(names[0])
                yield self.own("take", Place(path), [held.stacked], names[0], made.shape, index=at)
                out.append(made)
        elif op == "TensorListSetItem":
            at, x = _index(node, ins[1], path), ins[2]
            if held.stacked is not None or not isinstance(x, Input):
                raise _data(node, path, "it overwrites an element of a list that was given as one tensor")
            kept = x
            if x.value is None:  # the next iteration sets the same name again
                self.snapshots += 1
                kept = replace(x, tensor=f"{x.tensor}@{self.snapshots}")
                yield self.own("same", None, [x], kept.tensor or "", x.shape)
            out.append(replace(held, elements={**held.elements, at: kept}))
        elif op == "TensorListStack":
            if held.stacked is not None:
                out.append(held.stacked)
                return
            n = held.length if held.length is not None else len(held.elements)
            xs = [held.elements[k] for k in range(n) if k in held.elements]
            if len(xs) != n or not xs or any(x.value is not None for x in xs):
                raise _data(node, path, "some of the list's elements were never set")
            name = names[0] if names and names[0] else f"stack@{path}"
            yield self.own("stack", Place(path), xs, name, (n, *xs[0].shape))
            out.append(Input(tensor=name, shape=(n, *xs[0].shape), dtype=xs[0].dtype))
        else:
            raise _data(node, path, "this op has no translation for lists")


class _Attributes(Mapping[str, Any]):
    """A node's attributes; "node" is the node itself."""

    def __init__(self, node: TfNode):
        self._node = node

    def __getitem__(self, key: str) -> Any:
        return self._node if key == "node" else self._node.attr[key]

    def __contains__(self, key: object) -> bool:
        return key in self._node.attr

    def __iter__(self) -> Iterator[str]:
        return iter(self._node.attr)

    def __len__(self) -> int:
        return len(self._node.attr)


def _reshaped(node: TfNode, ins: Sequence[Input]) -> tuple[int, ...] | None:
    """The shape of an op's result, for ops whose last reshape the frontend may omit."""
    if node.op == "Reshape" and ins[1].value is not None:
        size = int(np.prod(ins[0].shape, dtype=np.int64))
        wanted = [int(s) for s in ins[1].value]
        known = int(np.prod([s for s in wanted if s != -1], dtype=np.int64))
        return tuple(size // known if s == -1 else s for s in wanted)
    if node.op == "MatMul" or node.op.startswith("BatchMatMul"):
        flags = ("transpose_a", "transpose_b") if node.op == "MatMul" else ("adj_x", "adj_y")
        a, b = (key in node.attr and node.attr[key].b for key in flags)
        x, y = ins[0].shape, ins[1].shape
        lead = np.broadcast_shapes(x[:-2], y[:-2])
        return (*lead, x[-1] if a else x[-2], y[-2] if b else y[-1])
    if node.op.endswith("SoftmaxCrossEntropyWithLogits"):
        return (ins[0].shape[0],)
    return None


def _data(node: TfNode, path: str, why: str) -> PaseError:
    return PaseError(f"the op cannot be in a Mesh-TensorFlow program: {why}", where=f"'{node.op}' at {path}")


def _index(node: TfNode, v: _WalkedValue, path: str) -> int:
    if not isinstance(v, Input) or v.value is None:
        raise _data(node, path, "the index of the element depends on data")
    return int(v.value.reshape(()))


def _constant(node: TfNode, name: str) -> _WalkedValue:
    from tensorflow.python.framework import tensor_util

    proto = node.attr["value"].tensor
    if dtype_name(proto.dtype) in ("string", "resource", "variant"):
        return None
    return _known(np.asarray(tensor_util.MakeNdarray(proto)), name)


def _run(node: TfNode, arrays: Sequence[np.ndarray], path: str) -> list[np.ndarray]:
    """The results that TensorFlow itself computes for known operands."""
    import tensorflow.compat.v1 as tf

    definition = tf.NodeDef(name="known", op=node.op)
    for key in node.attr:
        if not key.startswith("_"):
            definition.attr[key].CopyFrom(node.attr[key])
    graph = tf.Graph()
    with graph.as_default():
        ins = [tf.constant(a) for a in arrays]
        wanted = tf.GraphDef()
        for k in range(len(arrays)):
            definition.input.append(f"in{k}")
            fed = wanted.node.add(name=f"in{k}", op="Placeholder")
            fed.attr["dtype"].type = ins[k].dtype.as_datatype_enum
        wanted.node.append(definition)
        made = tf.import_graph_def(
            wanted,
            input_map={f"in{k}:0": t for k, t in enumerate(ins)},
            return_elements=["known"],
            name="",
        )
        with tf.Session(graph=graph) as session:
            try:
                return [np.asarray(a) for a in session.run(list(made[0].outputs))]
            except tf.errors.OpError as e:
                raise PaseError(
                    f"TensorFlow cannot run the op on known operands: {e}", where=f"'{node.op}' at {path}"
                ) from e
